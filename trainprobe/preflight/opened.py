"""Objects of classes of their own that hold tensors, as a batch of graphs or of padded pictures does, as nodes of a tree."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node, tree_flatten, tree_map

from trainprobe.engine.core.containers import children
from trainprobe.engine.core.guard import attempt

_DEEPEST, _MOST = 8, 20_000  # objects inside each other, and in all: of larger ones not all tensors are known
_WHOLE = (nn.Module, nn.Parameter, Optimizer, type, FunctionType, ModuleType)  # are never opened
_NO_OBJECTS = (int, float, str, bool, type(None))
_BOOKKEEPING = ("_slice_dict", "_inc_dict")  # of PyTorch Geometric: how a batch was made of graphs


class Attribute(str):
    """The name of a tensor that an object brought along, of which a model may leave some alone."""

    __slots__ = ()


class Opened:
    """An object as a node of a tree.

    names: of the attributes that hold its tensors and lists. parts: these, or what stands for them.
    """

    def __init__(self, held: Any, names: list[str], tensors: list[Any], same: list[Any], parts: list[Any]) -> None:
        self._held, self._tensors, self._same = held, tensors, same
        self.names, self.parts = names, parts

    def with_parts(self, parts: list[Any]) -> Opened:
        """Return the same object with other parts."""
        return Opened(self._held, self.names, self._tensors, self._same, parts)

    def closed(self) -> Any:
        """Return a copy of the object that holds the parts; what holds no tensor is shared with it."""
        parts = zip(self._tensors, self.parts, strict=True)
        return deepcopy(self._held, {**{id(x): x for x in self._same}, **{id(old): new for old, new in parts}})


def _with_keys(x: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
    keys: list[Any] = [*map(GetAttrKey, x.names)]
    return [*zip(keys, x.parts, strict=True)], x


register_pytree_node(Opened, lambda x: (x.parts, x), lambda parts, x: x.with_parts([*parts]), flatten_with_keys_fn=_with_keys)


def opened(tree: Any) -> Any:
    """Return nested containers with objects that hold tensors as `Opened`, as they are now; one that has no copy stays."""
    return tree_map(lambda x: attempt(_opened, x, otherwise=lambda _: x), tree, is_leaf=is_listed)


def is_listed(x: Any) -> bool:
    """Tell whether this is a list of texts or numbers, as of a length for each row."""
    return type(x) in (list, tuple) and len(x) > 1 and all(type(item) in (int, float, str) for item in x)


def closed(tree: Any) -> Any:
    """Return nested containers with the objects that were opened."""
    return tree_map(lambda x: x.closed() if isinstance(x, Opened) else x, tree, is_leaf=_is_opened)


def named_tensors(tree: Any, name: str) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of nested containers, in order: an `Attribute` in an object, else the given name."""
    found = list[tuple[str, Tensor]]()
    for x in tree_flatten(tree, is_leaf=_is_opened)[0]:
        inside = [(name, x)] if isinstance(x, Tensor) else _Inside(x).found.values()
        found += [(own if item is x else Attribute(own), item) for own, item in inside if isinstance(item, Tensor)]
    return found


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers and in the objects that they hold, in order."""
    return [tree] if isinstance(tree, Tensor) else [tensor for _, tensor in named_tensors(tree, "")]


def _is_opened(x: Any) -> bool:
    return isinstance(x, Opened)


def _opened(x: Any) -> Any:
    inside = _Inside(x)
    if inside.ended:
        raise ValueError(f"a {type(x).__name__} holds more than {_MOST} objects")
    if isinstance(x, Tensor) or is_listed(x) or not any(isinstance(item, Tensor) for _, item in inside.found.values()):
        return x
    names, tensors = ([*part] for part in zip(*inside.found.values(), strict=True))
    now = Opened(x, names, tensors, inside.same, tensors)
    return Opened(now.closed(), names, tensors, inside.same, tensors)


class _Inside:
    """What an object holds. found: id → (attribute, tensor or list), in order. same: objects below it without one.

    ended: whether it is too large to be seen whole.
    """

    def __init__(self, x: Any) -> None:
        self.found, self.same, self._seen = dict[int, tuple[str, Any]](), list[Any](), dict[int, bool]()
        self.ended = False
        self._holds("", x, _DEEPEST)

    def _holds(self, name: str, x: Any, deepest: int) -> bool:
        """Tell whether there is a tensor or a list in an object."""
        if (isinstance(x, Tensor) and not isinstance(x, nn.Parameter)) or is_listed(x):
            self.found.setdefault(id(x), (name, x))
            return True
        if id(x) in self._seen:
            return self._seen[id(x)]
        self._seen[id(x)] = True  # until it is known, as of an object that holds itself
        whole = isinstance(x, _WHOLE) or name in _BOOKKEEPING
        if not whole and (not deepest or len(self._seen) > _MOST) and type(x) not in _NO_OBJECTS:
            whole = self.ended = True
        inside = () if whole else [self._holds(key, item, deepest - 1) for key, item in _items(x, name)]
        self._seen[id(x)] = any(inside)
        if not any(inside):
            self.same.append(x)
        return any(inside)


def _items(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object and what it contains; elements of a list have its name."""
    if isinstance(x, Opened):
        yield from zip(x.names, x.parts, strict=True)
        return
    yield from getattr(x, "__dict__", {}).items()
    for key, item in (children(x) or ()) if not hasattr(x, "__dict__") or isinstance(x, dict | list | tuple) else ():
        yield (name if isinstance(x, list | tuple) and not hasattr(x, "_fields") else key), item
