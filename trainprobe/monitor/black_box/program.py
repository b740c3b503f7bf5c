"""The black box of a run: keeps the last steps, and where in the step in progress the training is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainprobe.engine.core.position import BETWEEN, Position
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.engine.storage.step_journal import StepJournal
from trainprobe.errors import StopTraining
from trainprobe.monitor.black_box.box import BlackBox
from trainprobe.monitor.black_box.plan import BlackBoxPlan


class BlackBoxProgram(Program):
    """See the module text.

    plan: the `black_box` section of a plan. about: what all steps have in common (see
    `engine.storage.step_journal.read_journal`). facts:
    returns what a step's record lacks, its batches. random_state: returns the random state, as a step ends.
    """

    def __init__(
        self,
        plan: BlackBoxPlan,
        about: Mapping[str, Any],
        facts: Callable[[StepData], Mapping[str, Any]],
        random_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        super().__init__("black_box", Schedule(), part="the black box")
        self.plan = plan
        self.position = Position()
        self.box: BlackBox | None = None
        self._about = about
        self._facts = facts
        self._random_state = random_state
        self._ended_in: Mapping[str, Any] = {}  # the random state at the end of the step that is judged
        self._asked = False  # for a dump

    def attached(self, probe: EngineProbe) -> None:
        """Follow where the training is; once the tool has stopped, say nothing of the step in progress."""
        self._probe = probe
        probe.guard.on_trip(self._forget_step)

    def sinks(self, place: Place) -> Mapping[str, Any]:
        """Open the box, which is written out on the writer's thread."""
        self.box = BlackBox(self.plan, self._probe.plan.output, place, self.position, self._about)
        return {"black_box": self.box}

    def begins(self, step: int) -> None:
        """Tell the box that the training is in a step."""
        self.position.begins(step)

    def journal(self, step: int) -> StepJournal | None:
        """Return what tells the box of the step in progress."""
        return self.box.follow(step) if self.box is not None else None

    def collected(self) -> Callable[[StepData], object] | None:
        """Return what remembers the random state at the end of this step."""
        state = self._random_state()

        def remember(step_data: StepData) -> None:
            self._ended_in = state

        return remember

    def judge(self, step_data: StepData) -> Sequence[Finding]:
        """Keep a step; find nothing."""
        if self.box is not None:
            self.box.hold(step_data, {**self._facts(step_data), **self._ended_in})
        return ()

    def decide(self, found: Sequence[Finding]) -> tuple[int, StopTraining | None]:
        """Have the steps after a severe finding collected in full, once."""
        if self._asked or self.box is None or not any(map(self.box.severe, found)):
            return 0, None
        self._asked = True
        return self.plan.dump_steps, None

    def ended(self, step: int, complete: bool) -> None:
        """Tell the box that the training is between two steps."""
        self.position.is_in(BETWEEN)

    def interrupted(self, why: str) -> None:
        """Have the box written out when the writer ends."""
        if self.box is not None:
            self.box.interrupted(why)

    def _forget_step(self) -> None:
        if self.box is not None:
            self.box.unfollow()
