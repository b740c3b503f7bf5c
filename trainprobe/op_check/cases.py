"""One call to be judged: what it was given and what the device made of it, as tensors on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainprobe.engine.core.records import Value

Tensor = torch.Tensor


class NotChecked(Exception):  # noqa: N818  (named for what it says)
    """There is no reference for a call; the text says why."""


@dataclass(slots=True)
class Case:
    """A call of one operator.

    name: as the dump has it, `Functional.linear`. args, kwargs: trees of tensors in their recorded dtypes and plain values, as
    they were before the call. outputs: what came out, flat, None where the dump lacks it.
    gradients: what reached the outputs' autograd node in the backward, one for each of its outputs; None without a backward.
    results: the gradients that node handed on, one for each of its inputs. requires_grad: of each tensor in args and
    kwargs, in order.
    of_inputs: results are the gradients of the call's own tensor arguments, in order, rather than those of its autograd node.
    written: position or keyword of arguments that the call wrote and did not return → what they were after it, flat.
    overwritten: position or keyword of arguments that changed, and that it does not say it writes → before and after it.
    generator: state of the host's generator before the call, of operators that draw numbers there.
    unwritten: whether what came out is memory that nobody had written.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outputs: Sequence[Tensor | None] = ()
    gradients: Sequence[Tensor | None] | None = None
    results: Sequence[Tensor | None] = ()
    requires_grad: Sequence[bool] = ()
    of_inputs: bool = False
    function: Callable[..., Any] | None = None
    written: Mapping[str, Sequence[Tensor]] = field(default_factory=dict[str, Sequence[Tensor]])
    generator: Tensor | None = None
    overwritten: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict[str, "tuple[Tensor, Tensor]"])
    unwritten: bool = False

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, in order."""
        return [*flat((self.args, dict(self.kwargs)))]


def strides_of(value: Value) -> tuple[int, ...] | None:
    """Return the strides that a dump holds of a value, or None where it lay in order, or what stands there are none."""
    strides: Any = (value.extra or {}).get("stride")
    if not isinstance(strides, list):
        return None
    given: list[Any] = strides  # pyright: ignore[reportUnknownVariableType]
    whole = len(given) == len(value.shape) and all(type(s) is int and s >= 0 for s in given)
    return tuple(given) if whole else None


def laid(t: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the same numbers with these strides in memory; what `expand` lets several places share is one number again."""
    if len(strides) != t.ndim or t.numel() == 0 or any(s < 0 for s in strides):
        return t
    size = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
    if size > _WIDEST * t.numel():
        return t  # a few numbers of a large tensor
    memory = torch.zeros(size, dtype=t.dtype)
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
    whole = memory.as_strided(t.shape, tuple(strides))
    whole[first] = t[first]
    return whole


_WIDEST = 64


def flat(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree of tuples, lists and dicts, depth first."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from flat(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from flat(item)


def mapped(tree: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return the tree with each tensor changed, and each leaf that is no tensor changed by `other`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(mapped(item, change, other) for item in tree)
    if isinstance(tree, list):
        return [mapped(item, change, other) for item in tree]
    if isinstance(tree, Mapping):
        return {key: mapped(item, change, other) for key, item in tree.items()}
    return other(tree)


def argument(case: Case, name: str, place: int, default: object) -> object:
    """Return an argument of a call by its name, or by its place among the positional ones."""
    return case.kwargs.get(name, case.args[place] if len(case.args) > place else default)
