"""Tensors with a gradient that `all_gather` brought back without one, and that are then multiplied with others that have one.

While a step is audited, the method of process groups that gathers is replaced. Only once it was given a tensor that requires a
gradient, outside of a custom autograd function, are the functions replaced that join and multiply, until the step ends.
Nothing is read: objects tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn import functional

from trainprobe.engine.guard import Guard
from trainprobe.engine.taps.graph import parameters_behind
from trainprobe.engine.taps.replaced import Replaced

_JOINS = ((torch, "cat"), (torch, "concat"), (torch, "stack"), (torch, "vstack"))
_PRODUCTS = (
    *((torch, name) for name in ("matmul", "mm", "einsum")),
    *((Tensor, name) for name in ("__matmul__", "matmul", "mm")),
    (functional, "linear"),
)


class GatheredFeatures:
    """See the module text. names: id of parameter → recorded name."""

    def __init__(self, guard: Guard, names: Callable[[], Mapping[int, str]]) -> None:
        self._guard = guard
        self._names = names
        self._method: Replaced | None = None
        self._functions: list[Replaced] = []
        self._cut: dict[int, weakref.ref[Tensor]] = {}  # id of a tensor that was cut off
        self._behind = ""  # a parameter on which what was gathered depends
        self._used = False

    def begin(self) -> None:
        """Look at what is gathered in a step."""
        self._cut, self._behind, self._used = {}, "", False
        if self._method is None and dist.is_available() and dist.is_initialized():
            kind: Any = dist.ProcessGroup
            self._method = Replaced(kind, "allgather", self._gathering(kind.allgather))

    def end(self) -> None:
        """Put everything back."""
        for replaced in (*self._functions, self._method):
            if replaced is not None:
                replaced.back()
        self._functions, self._method, self._cut = [], None, {}

    def take(self) -> str:
        """Return a parameter that what was gathered depends on, where it was used; otherwise nothing."""
        return self._behind if self._used else ""

    def _gathering(self, original: Any) -> Any:
        def gather(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not gather.ended and torch.is_grad_enabled() and len(args) >= 2:  # type: ignore[attr-defined]
                self._guard.run(self._look, args[0], args[1])
            return original(group, *args, **kwargs)

        return gather

    def _look(self, outputs: Any, inputs: Any) -> None:
        given = [t for t in _flat(inputs) if t.requires_grad and t.dim() >= 2]
        if not given:
            return
        self._behind = self._behind or next((name for t in given for name in parameters_behind(t, self._names())), "")
        self._cut_off(t for t in _flat(outputs) if not t.requires_grad)
        if not self._functions:
            watched = (*((place, self._joining) for place in _JOINS), *((place, self._multiplying) for place in _PRODUCTS))
            self._functions = [
                Replaced(owner, name, watch(getattr(owner, name)), traced=True) for (owner, name), watch in watched
            ]

    def _joining(self, original: Any) -> Any:
        def join(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not join.ended and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
                self._guard.run(self._joined, args, result)
            return result

        return join

    def _multiplying(self, original: Any) -> Any:
        def multiply(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not multiply.ended and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
                self._guard.run(self._multiplied, args, result)
            return result

        return multiply

    def _joined(self, args: Any, result: Any) -> None:
        if isinstance(result, Tensor) and not result.requires_grad and any(self._is_cut(t) for t in _flat(args)):
            self._cut_off([result])

    def _multiplied(self, args: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            self._used |= any(self._is_cut(t) for t in _flat(args))

    def _cut_off(self, tensors: Iterable[Tensor]) -> None:
        self._cut |= {id(t): weakref.ref(t) for t in tensors}

    def _is_cut(self, t: Tensor) -> bool:
        """Tell whether a tensor, or what it is a view of, was cut off."""
        if t.requires_grad:
            return False
        with DisableTorchFunction():
            return any(
                one is not None and (known := self._cut.get(id(one))) is not None and known() is one for one in (t, t._base)
            )


def _flat(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from _flat(item)
