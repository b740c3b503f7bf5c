"""Modules that scripts for mindstudio-probe import from and that have no file here, such as `trainprobe.pytorch.common`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class ClassicModule(ModuleType):
    """A module of names that lie elsewhere, imported when they are asked for.

    where: name → the module that holds it. instead: name → the sentence of the ImportError that asking for it raises.
    """

    def __init__(self, name: str, where: Mapping[str, str] | None = None, instead: Mapping[str, str] | None = None) -> None:
        super().__init__(name, "Names that scripts for mindstudio-probe import; see docs/migration.md.")
        self._where, self._instead = dict(where or {}), dict(instead or {})

    def __getattr__(self, name: str) -> Any:
        return look_up(self.__name__, name, self._where, self._instead)


def look_up(module: str, name: str, where: Mapping[str, str], instead: Mapping[str, str]) -> Any:
    """Return a name that a module takes from another one.

    Raises ImportError, with what replaces it, for a name that cannot be had, and AttributeError for an unknown one.
    """
    if name in where:
        return getattr(importlib.import_module(where[name]), name)
    if name in instead:
        raise ImportError(f"{module} has no {name}: {instead[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def add_modules(*modules: ClassicModule) -> None:
    """Let `import` find these modules. Python looks there once it has imported the module before the last dot."""
    for module in modules:
        sys.modules[module.__name__] = module
        above, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[above], last, module)
