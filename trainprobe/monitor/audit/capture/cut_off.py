"""Tensors that were cut off from the graph in a step, followed by identity through a few functions of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard

Place = tuple[Any, str]  # what holds a function, and its name


class CutOff:
    """Knows tensors without a gradient that had one; views of them count as they do. Nothing is read: objects tell."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._replaced: list[Replaced] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Follow these from now on, but for those that require a gradient."""
        self._known |= {id(t): weakref.ref(t) for t in tensors if not t.requires_grad}

    def any_of(self, x: Any) -> bool:
        """Tell whether one of these tensors, within lists and tuples too, is cut off."""
        return any(self._is_known(t) for t in flat(x))

    def listen(self, places: Sequence[Place], listener: Callable[[Any, Any], None]) -> None:
        """Replace functions until `forget`, and call `listener(args, result)` after each call that gets a cut-off tensor."""
        for owner, name in places:
            if hasattr(owner, name):
                self._replaced.append(Replaced(owner, name, self._watched(getattr(owner, name), listener), traced=True))

    def forget(self) -> None:
        """Put the functions back, and follow nothing."""
        for replaced in self._replaced:
            replaced.back()
        self._known, self._replaced = {}, []

    def _watched(self, original: Any, listener: Callable[[Any, Any], None]) -> Any:
        @wraps(original)  # ops are named by it
        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not function.ended and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
                self._guard.run(self._notify, listener, args, result)
            return result

        return function

    def _notify(self, listener: Callable[[Any, Any], None], args: Any, result: Any) -> None:
        if isinstance(result, Tensor) and self.any_of(args):
            listener(args, result)

    def _is_known(self, t: Tensor) -> bool:
        if t.requires_grad:
            return False
        with DisableTorchFunction():
            refs = ((one, self._known.get(id(one))) for one in (t, t._base) if one is not None)
            return any(ref is not None and ref() is one for one, ref in refs)


def flat(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from flat(item)
