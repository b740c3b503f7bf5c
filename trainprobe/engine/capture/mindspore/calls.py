"""Calls of cells that are known: of the optimizers, or of the model as a whole.

While a step is collected, `mindspore.nn.Cell.__call__` is replaced for the class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mindspore.nn import Cell

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.mindspore.cells import is_optimizer
from trainprobe.engine.capture.mindspore.tensor_hooks import wait
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.tape import Tape

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


class KnownCalls(Tap):
    """Reports outermost calls of `cells`: `before(cell, args, kwargs)` and, once it has run, `after(cell)`."""

    def __init__(self, guard: Guard, before: Before, after: Callable[[Any], None] | None = None) -> None:
        self._guard = guard
        self._before, self._after = before, after
        self._known: frozenset[int] = frozenset()
        self.cells: tuple[Any, ...] = ()
        self._original: Replaced | None = None
        self._asleep = True

    def know(self, cells: Iterable[Any]) -> None:
        """Report calls of these cells from now on."""
        self.cells = tuple(cells)
        self._known = frozenset(map(id, self.cells))

    def begin(self, tape: Tape | None = None) -> None:
        """Replace `Cell.__call__`."""
        self._asleep = False
        if self._original is not None:
            return
        original: Any = Cell.__call__

        def call(cell: Any, *args: Any, **kwargs: Any) -> Any:
            if self._asleep or call.ended or not (id(cell) in self._known or self._joins(cell)):  # type: ignore[attr-defined]
                return original(cell, *args, **kwargs)
            return self._run(original, cell, args, kwargs)

        self._original = Replaced(Cell, "__call__", call)

    def end(self, again: bool = False) -> None:
        """Put `Cell.__call__` back; with `again` it stays, asleep."""
        self._asleep = True
        if not again and self._original is not None:
            self._original.back()
            self._original = None

    def _joins(self, cell: Any) -> bool:
        """Tell whether a cell that is not known is one of them all the same, and know it from now on."""
        return False

    def _run(self, original: Any, cell: Any, args: Any, kwargs: Any) -> Any:
        self._asleep = True  # what it calls within is part of its own call
        try:
            wait()
            self._guard.run(self._before, cell, args, kwargs)
            out = original(cell, *args, **kwargs)
            if self._after is not None:
                wait()
                self._guard.run(self._after, cell)
            return out
        finally:
            self._asleep = False


class OptimizerTap(KnownCalls):
    """Reports calls of the optimizers: `before(optimizer, gradients)` and `after(optimizer)`.

    Another one that steps a parameter of the model takes the place of those that hold a parameter that it holds too.
    called: whether one was called from Python in this step.
    """

    def __init__(self, guard: Guard, before: Callable[[Any, Any], None], after: Callable[[Any], None]) -> None:
        self._models: list[Any] = []
        self.called = False

        def begins(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.called = True
            before(optimizer, args[0] if args else next(iter(kwargs.values()), ()))

        super().__init__(guard, begins, after)

    def begin(self, tape: Tape | None = None) -> None:
        """Replace `Cell.__call__`."""
        self.called = False
        super().begin(tape)

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember the optimizers."""
        self._models = listed(model)
        self.know(listed(optimizer))

    def _joins(self, cell: Any) -> bool:
        return is_optimizer(cell) and bool(self._guard.run(self._take_in, cell))

    def _take_in(self, optimizer: Any) -> bool:
        held = {id(p) for p in optimizer.parameters}
        if held.isdisjoint(id(p) for model in self._models for p in model.get_parameters()):
            return False
        self.know([*(other for other in self.cells if held.isdisjoint(map(id, other.parameters))), optimizer])
        return True


def listed(x: Any) -> list[Any]:
    """Return what may be one thing, several, or None, as a list."""
    return list(x) if isinstance(x, list | tuple) else [] if x is None else [x]
