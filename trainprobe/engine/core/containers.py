"""What the containers of a program hold: lists, mappings, dataclasses, of whatever class. Walks are bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.naming import utf8

DEEPEST = 100  # containers inside each other in a walk for tensors
MOST = 100_000  # containers in a walk, and items of one that is no list, tuple or dict
_NEVER = frozenset({int, float, bool, str, bytes, type(None)})


def children(x: Any) -> list[tuple[str, Any]] | None:
    """Return the named children of a container, or None for anything else; raises what the class of `x` raises."""
    if isinstance(x, Mapping):
        return [(key_text(k), v) for k, v in islice(x.items(), MOST)]
    kind = type(x)
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        return [(str(names[i]) if names else str(i), v) for i, v in enumerate(x)]
    if issubclass(kind, list | set | frozenset):
        return [(str(i), v) for i, v in enumerate(islice(x, MOST))]
    if is_dataclass(kind):
        return [(f.name, getattr(x, f.name)) for f in fields(kind)]
    return None


def key_text(key: Any) -> str:
    """Return the key of a mapping as text that can be written; `?` where it cannot be printed (see `native/tree.c`)."""
    return utf8(attempt(str, key, otherwise=lambda _: "?"))


def tensors_in(x: Any, is_tensor: Callable[[Any], bool]) -> list[Any]:
    """Return the tensors in nested containers, in order; what raises when it is looked into holds none. Sets have no order."""
    walk = _Walk(is_tensor)
    walk.visit(x)
    return walk.found


class _Walk:
    def __init__(self, is_tensor: Callable[[Any], bool]) -> None:
        self.found: list[Any] = []
        self._is_tensor = is_tensor
        self._above: set[int] = set()
        self._left = MOST

    def visit(self, x: Any) -> None:
        if type(x) in _NEVER:
            return
        if attempt(self._is_tensor, x, otherwise=lambda _: False):
            self.found.append(x)
        elif self._may_enter(x):
            self._left -= 1
            self._above.add(id(x))
            for _, item in attempt(children, x, otherwise=lambda _: None) or ():
                self.visit(item)
            self._above.discard(id(x))

    def _may_enter(self, x: Any) -> bool:
        if not self._left or len(self._above) >= DEEPEST or id(x) in self._above:
            return False
        return not issubclass(type(x), set | frozenset)
