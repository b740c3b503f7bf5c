"""Values that a functional collective still writes: they are looked at when the training waits for them.

Functional collectives (`torch.distributed._functional_collectives`, which DTensor calls too) return at once, and their result
is written until somebody uses it. What the tape meets before that has no numbers yet. `torch.ops._c10d_functional.wait_tensor`,
through which each such wait goes, is replaced while a step is collected: behind it the numbers are there. Nothing is waited for
that the training does not wait for, and what is never waited for has a note instead of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction

from trainprobe.engine.arrays.torch_arrays import still_written
from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.tape import Tape

Look = Callable[[Any], None]


class InPlaceOfOp:
    """Is called in place of an operator of `torch.ops`, whose attributes (its overloads, say) it shows as its own.

    Where a torch-function mode is on, torch looks the operator up by its name and hands it to the mode: so the operator itself
    stands in its place again while it runs, and modes see what they would see without the tool.
    """

    def __init__(self, namespace: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
        self._original: Any = getattr(namespace, name)  # which makes it known to the namespace
        self._call = around(self._run)
        self._runs = False
        self.below: Any = self._original
        self.ended = False
        self.replaced = Replaced(namespace, name, self, traced=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._original if self.ended or self._runs else self._call)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        away, self._runs = self.replaced.suspend(), True
        try:
            return self._original(*args, **kwargs)
        finally:
            self._runs = False
            if away:
                self.replaced.restore()


def replaced_op(namespace: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> Replaced:
    """Put a function in the place of an operator. around: returns it, given what runs the operator."""
    return InPlaceOfOp(namespace, name, around).replaced


class AwaitedTap(Tap):
    """See the module text. Does nothing where torch.distributed is not initialised."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._tape: Tape | None = None
        self._wait: Replaced | None = None
        self._expected: dict[int, list[tuple[ref[Any], tuple[Any, ...], Look]]] = {}  # address of a storage → what lies there

    def begin(self, tape: Tape) -> None:
        """Replace the operator that waits, and have the tape say what it cannot look at yet."""
        self.end()
        if dist.is_available() and dist.is_initialized():
            self._tape = tape
            tape.awaits = self._expect
            self._wait = replaced_op(torch.ops._c10d_functional, "wait_tensor", self._waiting)

    def end(self, again: bool = False) -> None:
        """Put the operator back; what was not waited for keeps its note."""
        if self._wait is not None:
            self._wait.back()
        if self._tape is not None:
            self._tape.awaits = None
        self._wait = self._tape = None
        self._expected.clear()

    def _expect(self, t: Any, look: Look) -> bool:
        """Have `look` called with what a tensor stands for, once that is waited for; False where nothing writes it."""
        memory = still_written(t)
        if memory is None:
            return False
        self._expected.setdefault(_storage(memory), []).append((ref(memory), _place(memory), look))
        return True

    def _waiting(self, original: Any) -> Callable[..., Any]:
        def wait_tensor(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._expected and self._tape is not None:
                self._guard.run(self._arrived, result)
            return result

        return wait_tensor

    def _arrived(self, waited: Any) -> None:
        with DisableTorchFunction():
            for memory, place, look in self._expected.pop(_storage(waited), ()):
                t = memory()
                if t is not None or place == _place(waited):
                    look(waited if t is None else t)


def _storage(t: Any) -> int:
    return t.untyped_storage()._cdata


def _place(t: Any) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride()
