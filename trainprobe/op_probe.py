"""A probe that writes no dump: it collects chosen steps with all values, and judges their operators as each step ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.program import Schedule
from trainprobe.errors import OutputError, StopTraining
from trainprobe.op_check.plan import OpCheckPlan
from trainprobe.watching import Probe

PART = "op_check"
LOG_FILE = "op_check.txt"
Say = Callable[[str], None]


class OpProbe(Probe):
    """Judges operators inside the training. say: writes one line of the log. folder: where a replay is written.

    report: is given each finding. level: "mix", or "L1" where there is no model. on_error: as in a plan.
    """

    def __init__(
        self,
        settings: OpCheckPlan,
        say: Say,
        folder: Path,
        *,
        report: Callable[[Finding], None] | None = None,
        level: Literal["L1", "mix"] = "mix",
        on_error: Literal["continue", "raise"] | None = None,
        rename: Rename | None = None,
        place: Place | None = None,
    ) -> None:
        from trainprobe.op_check.online.training_side import OnlineJudge
        from trainprobe.op_check.training import HeldValues, StepJudge

        self._report = report
        self._held = HeldValues(settings.max_bytes)
        plan = {
            **{"level": level, "task": "tensor", "step": settings.step, "rank": settings.rank, "sinks": ()},
            **{"statistics": (), "stacks": False, "console": False, "output": folder},
            **({} if on_error is None else {"on_error": on_error}),
        }
        super().__init__(plan, rename=rename, place=place)
        elsewhere = settings.server is not None or settings.folder is not None
        self._online = OnlineJudge(settings, self._held, say) if elsewhere else None
        self.judge = self._online or StepJudge(settings, self._held, say, folder)
        self.watchers.append(lambda step_data: self.guard.part(PART, self._judged, step_data) or ())
        self.guard.of(PART).on_trip(self._judge_no_more)

    def _judge_no_more(self) -> None:
        """Collect no further step, because the judge has failed."""
        self._held.drop()
        self.programs[0].schedule = Schedule()
        self._install_schedules()

    def _judged(self, step_data: StepData) -> Sequence[Finding]:
        from trainprobe.engine.capture.random_state import put_back, random_state

        states = random_state()  # some operators draw numbers when they are judged
        try:
            self._writer.flush()  # until then values may be on their way
            return self.judge(step_data) if step_data.complete else ()
        finally:
            put_back(states)
            self._held.drop()

    def _open_writer(self, place: Place) -> Any:
        from trainprobe.engine.storage.writer import Writer

        self._writer = Writer({PART: self._held}, place=place, on_error=self.plan.on_error, tell=self.findings.append)
        if self._online is not None:
            self._online.start(place)
        return self._writer

    def end_step(self, *, complete: bool = True) -> StepData | None:
        """End the step; what a server has judged since the last one is reported. Raises StopTraining as the plan says."""
        step_data = super().end_step(complete=complete)
        if self._online is not None:
            self.guard.run(self.guard.part, PART, self._report_arrived, self._online.arrived)
            self.guard.run(self._online.make_room)
            bug = self._online.must_stop()
            if bug:
                raise StopTraining(f"op_check: {bug}")
        return step_data

    def _report_arrived(self, arrived: Callable[[], Sequence[Finding]]) -> None:
        for finding in arrived():
            self._tell(finding)

    def close(self) -> None:
        """Let go of everything; what was judged is the probe's last sentence."""
        if not self.closed and self.plan.wants_rank(self.place.rank):
            if self._online is not None:
                self.guard.run(self.guard.part, PART, self._report_arrived, self._online.close)
            self.sentences = [self.judge.summary()]
        super().close()

    def _tell(self, finding: Finding) -> None:
        super()._tell(finding)
        if self._report is not None:
            self._report(finding)


def beside(probe: Probe, rename: Rename | None, place: Place | None) -> OpProbe:
    """Return the probe that judges operators in the steps of another one, as the section `op_check` of its plan says."""
    from trainprobe.op_check.plan import validate

    plan = probe.plan
    log: list[Log] = []

    def say(text: str) -> None:
        if not log:
            log.append(Log(plan.output / f"rank{probe.place.rank}" / LOG_FILE))
        log[0](text)

    settings = validate(plan.op_check)
    folder = plan.output / "op_check"
    made = OpProbe(settings, say, folder, report=probe.report, on_error=plan.on_error, rename=rename, place=place)
    made.guard.farewell = "op_check is given up, everything else goes on"
    return made


class Log:
    """A text file of log lines, opened with its first line. Raises OutputError where it cannot be written."""

    def __init__(self, path: Path, head: str = "") -> None:
        self._path = path
        self._head = head
        self._file: Any = None

    def __call__(self, text: str) -> None:
        """Write a line; it is on disk when this returns."""
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
                self._file.write(f"{self._head}\n" if self._head else "")
            self._file.write(f"{text}\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
