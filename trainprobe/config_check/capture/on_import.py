"""Calls a function once a module has been imported, at once where it has been already."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Then = Callable[[Any], None]


class ImportWatch(importlib.abc.MetaPathFinder):
    """Waits for modules; stands first among the finders while it waits for any."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Callable[[], None], Then]] = {}
        self._searching: set[str] = set()  # another finder of this kind asks all finders in turn, this one too

    def wait_for(self, name: str, then: Then, before: Callable[[], None] = lambda: None) -> None:
        """Call then(module) once `name` has been imported, and before() when its import begins."""
        loaded = sys.modules.get(name)
        spec = getattr(loaded, "__spec__", None)
        if loaded is not None and not getattr(spec, "_initializing", False):
            then(loaded)
            return
        self._waiting[name] = (before, then)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Wait for nothing any more."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Find a module that is waited for as the other finders do, and call back after it has run."""
        if fullname not in self._waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            return self._find(fullname, path, target)
        finally:
            self._searching.discard(fullname)

    def _find(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> Any:
        for finder in [f for f in sys.meta_path if f is not self]:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                self._call_around(fullname, spec.loader)
                return spec
        return None

    def _call_around(self, name: str, loader: Any) -> None:
        """Have this one loader call back around running the module; a program may look for a module and never import it."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            before, then = self._waiting.pop(name, (_nothing, _nothing))
            before()
            run(module)
            then(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a built-in loader takes no attribute; such modules are not waited for
            pass


def _nothing(*_: Any) -> None:
    """Do nothing."""
