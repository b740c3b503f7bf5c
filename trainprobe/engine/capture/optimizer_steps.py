"""When the optimizer runs: torch's own global step hooks, there only while a step is collected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.gradients import sequence_number
from trainprobe.engine.capture.patching.step_hooks import StepListener, is_left_out, settle
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.tape import Tape


class OptimizerStepTap(Tap):
    """Calls `before` and `after` around every update of this process, nested ones once.

    An optimizer that is handed a closure runs forward and backward within its step: `before` is then called behind the closure.
    When it calls that again (a line search tries other weights, and may go back), `trial` is called with True, and with False
    behind it. waits: the step that has ended made a graph, and nothing stepped: gradients are accumulated, or a scaler
    skipped it. An update that was left out (`step_hooks.leave_out`) is none.
    """

    def __init__(
        self,
        guard: Guard,
        before: Callable[[Any], None],
        after: Callable[[Any], None],
        trial: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        self._guard = guard
        self._before = before
        self._after = after
        self._trial = trial
        self._depth = 0
        self._begun = 0
        self._listener: StepListener | None = None
        self._graphs = 0
        self._updated = False
        self.waits = False

    def begin(self, tape: Tape) -> None:
        """Listen."""
        self.end(True)
        self._depth = self._begun = 0
        self._graphs, self._updated = sequence_number(), False
        self._listener = StepListener(self._enter, self._leave)

    def end(self, again: bool = False) -> None:
        """Listen no more; with `again`, what torch holds stays for the step that follows."""
        if self._listener is not None:
            self._listener.remove(again)
            self.waits = not self._updated and sequence_number() != self._graphs
        elif not again:
            settle()
        self._listener = None

    def _enter(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            self._updated |= not is_left_out(optimizer)
            return None
        return behind_closure(args, kwargs, partial(self._begins, optimizer), partial(self._run_closure, optimizer))

    def _begins(self, optimizer: Any) -> None:
        if not is_left_out(optimizer):
            self._updated = True
            self._guard.run(self._before, optimizer)

    def _run_closure(self, optimizer: Any, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward, which the optimizer calls for: only then do the gradients exist. The first call counts."""
        if self._listener is not None and self._begun == id(optimizer):
            self._guard.run(self._trial, True)
            try:
                return closure(*args, **kwargs)
            finally:
                self._guard.run(self._trial, False)
        result = closure(*args, **kwargs)
        if self._listener is not None:
            self._begun = id(optimizer)
            self._begins(optimizer)
        return result

    def _leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._begun = 0
            if not is_left_out(optimizer):
                self._guard.run(self._after, optimizer)


def behind_closure(args: Any, kwargs: Any, now: Callable[[], Any], late: Callable[..., Any]) -> Any:
    """Call `now()`, or where an update is given a closure return (args, kwargs) with which `late(closure)` is called for it."""
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if not callable(closure):
        now()
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": partial(late, closure)}
    return (args[0], partial(late, closure), *args[2:]), kwargs
