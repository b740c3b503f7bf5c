"""Replaces functions while a run is captured and puts every one of them back.

A function that a module has imported by name (`from torch import rand`) is found there too, both when it is replaced and when
it is put back. A wrapper that somebody keeps all the same, or has wrapped again, only passes calls on from then on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trainprobe.config_check.capture.sealed_types import can_replace, is_sealed, replace_method

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Patch:
    owner: Any
    name: str
    wrapper: Any
    original: Any
    own: bool  # whether the owner itself held the original, or a base class of it


class Patches:
    """What is replaced at the moment."""

    def __init__(self) -> None:
        self._done: list[_Patch] = []

    def __len__(self) -> int:
        return len(self._done)

    @property
    def wrappers(self) -> list[Any]:
        """What stands in place of the originals at the moment."""
        return [patch.wrapper for patch in self._done]

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> bool:
        """Put wrap(original) in place of owner.name; nothing happens where there is no such name.

        False: the owner is a type that was written in C, and this interpreter does not let its methods be replaced.
        """
        original = getattr(owner, name, None)
        if original is None:
            return True
        own = name in vars(owner)
        kept = vars(owner)[name] if own else original
        if is_sealed(owner) and not can_replace(owner, name):
            return False
        wrapper = wrap(original)
        _set(owner, name, wrapper)
        self._done.append(_Patch(owner, name, wrapper, kept, own))
        return True

    def spread(self) -> None:
        """Put the wrappers also where modules have imported the originals by name."""
        wrappers = {id(p.original): p.wrapper for p in self._done if not isinstance(p.owner, type)}
        originals = {id(p.original): p.original for p in self._done}
        _swap(wrappers, originals, skip={id(p.owner) for p in self._done if isinstance(p.owner, ModuleType)})

    def undo(self) -> None:
        """Put everything back."""
        done, self._done = self._done, []
        for patch in reversed(done):
            if vars(patch.owner).get(patch.name, _ABSENT) is not patch.wrapper:
                continue  # somebody has wrapped it since; the wrapper passes calls on
            if patch.own:
                _set(patch.owner, patch.name, patch.original)
            else:
                delattr(patch.owner, patch.name)
        back = {id(p.wrapper): p.original for p in done if not isinstance(p.owner, type)}
        _swap(back, {id(p.wrapper): p.wrapper for p in done}, skip=set())


def before(see: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what wraps a function so that `see` is given the arguments of each call first."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            see(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    return wrap


def after(see: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what wraps a function so that `see` is given what each call returned, and its arguments behind that."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            see(result, *args, **kwargs)
            return result

        return call

    return wrap


def _set(owner: Any, name: str, value: Any) -> None:
    if is_sealed(owner):
        replace_method(owner, name, value)
    else:
        setattr(owner, name, value)


def _swap(replacement: dict[int, Any], alive: dict[int, Any], skip: set[int]) -> None:
    """Replace objects in the global names of all modules. alive: keeps the objects, so that their ids stay theirs."""
    if not replacement:
        return
    loaded: list[Any] = list(sys.modules.values())  # some programs put other objects there
    for module in loaded:
        if not isinstance(module, ModuleType) or id(module) in skip or module.__name__.startswith("trainprobe"):
            continue
        names = vars(module)
        for name in [n for n, value in list(names.items()) if id(value) in replacement]:
            names[name] = replacement[id(names[name])]
    alive.clear()
