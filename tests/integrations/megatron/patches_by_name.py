"""How MindSpeed patches Megatron, written anew for tests: by dotted name, all at once, dropping what stood there before.

A patch whose name ends in `wrapper` or `decorator` is put around the function, any other takes its place; every loaded module
that holds the same function gets the new one.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import ClassVar


class Manager:
    """Registers patches, applies them, and takes them off again."""

    FEATURES_LIST: ClassVar[list] = []

    def __init__(self) -> None:
        self.patches: dict[str, SimpleNamespace] = {}

    def register_patch(self, path: str, patch) -> None:
        entry = self.patches.setdefault(path, SimpleNamespace(function=None, wrappers=[]))
        if patch.__name__.endswith(("wrapper", "decorator")):
            entry.wrappers.append(patch)
        else:
            entry.function = patch

    def apply_patches(self) -> None:
        for path, entry in self.patches.items():
            owner, name = find(path)
            entry.original = getattr(owner, name)
            final = entry.function or entry.original
            for wrapper in entry.wrappers:
                final = wrapper(final)
            entry.final = final
            exchange(owner, name, entry.original, final)

    def remove_patches(self) -> None:
        for path, entry in self.patches.items():
            owner, name = find(path)
            exchange(owner, name, entry.final, entry.original)


def find(path: str):
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ModuleNotFoundError(path)


def exchange(owner, name: str, old, new) -> None:
    if getattr(owner, name) is old:
        setattr(owner, name, new)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
