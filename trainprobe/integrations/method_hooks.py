"""What stands around the functions of a framework's own loop, and tells a probe when its steps begin and end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.errors import StopTraining
from trainprobe.integrations.session import agreed
from trainprobe.watching import Probe


class MethodHooks:
    """Base of the hooks of a framework whose functions are replaced while a training is watched.

    device: where the ranks' small collective runs by which they agree to stop; None for the CPU. inside: whether a step is
    under way. updated: whether the optimizer has stepped in it.
    """

    def __init__(self, probe: Probe, device: Any) -> None:
        self.probe = probe
        self.inside = False
        self.updated = False
        self._device = device
        self._ends: list[Callable[[], Any]] = []
        monitor = probe.monitor_plan
        self._may_stop = monitor is not None and any("stop" in rule.actions for rule in monitor.rules.values())

    def around(self, owner: Any, name: str, listener: Callable[..., Any]) -> None:
        """Call listener(run, …) instead of owner.name(…) from now on, until `end`."""
        run = getattr(owner, name)
        probe = self.probe

        @functools.wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # a rank whose tool is disabled goes on asking with the others whether the run is to stop: they would wait for it
            if probe.closed or (probe.guard.tripped is not None and not self._may_stop):
                return run(*args, **kwargs)
            return listener(run, *args, **kwargs)

        watched.loop_hooks = self  # type: ignore[attr-defined]
        self._ends.append(Replaced(owner, name, watched).back)

    def end(self) -> None:
        """Take everything off; a step that is under way ends, whole if the optimizer has stepped."""
        while self._ends:
            self._ends.pop()()
        self.finish_step(complete=self.updated, last=True)

    def finish_step(self, *, complete: bool = True, last: bool = False) -> None:
        """End the step that is under way. Raises StopTraining, on all ranks at the same step, when a rule of one wants that.

        last: the training is over, so that no rank is asked and nothing is stopped.
        """
        if not self.inside:
            return
        self.inside = False
        stop = None
        try:
            self.probe.end_step(complete=complete)
        except StopTraining as wish:
            stop = wish
        if complete and not last and self._may_stop and agreed(stop is not None, self._device):
            raise stop or StopTraining("a rule wants the training to stop; another rank says which")

    def run_inside(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Call run; an error in it ends the step, and goes on."""
        try:
            return run(*args, **kwargs)
        except BaseException:
            self.finish_step(complete=False)
            raise

    def look(self, moment: str) -> None:
        """Look at the parameters; fused kernels and collectives write without a trace, so no tensor is taken for unchanged."""
        if self.probe.tape is not None:
            self.probe.tape.forget_all()
            self.probe.moment(moment)


def hooks_on(function: Any, kind: type[Any]) -> Any:
    """Return the hooks of a class that stand around a function, unless their probe is closed; else None."""
    hooks: Any = getattr(function, "loop_hooks", None)
    return hooks if isinstance(hooks, kind) and not hooks.probe.closed else None
