"""Operators judged while a training runs: chosen steps are collected with all values, and judged as each step ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.probe import Probe as EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.engine.storage.safe_files import open_private
from trainprobe.errors import OutputError, StopTraining
from trainprobe.op_check.plan import OpCheckPlan
from trainprobe.run.probe import Probe

if TYPE_CHECKING:
    from trainprobe.engine.storage.writer import Writer

PART = "op_check"
LOG_FILE = "op_check.txt"
Say = Callable[[str], None]


class OpProbe(Probe):
    """Judges operators inside the training. say: writes one line of the log. folder: where a replay is written.

    level: "mix", or "L1" where there is no model. on_error: as in a plan.
    """

    at_once = True  # values are held until they are judged

    def __init__(
        self,
        settings: OpCheckPlan,
        say: Say,
        folder: Path,
        *,
        level: Literal["L1", "mix"] = "mix",
        on_error: Literal["continue", "raise"] | None = None,
        rename: Rename | None = None,
    ) -> None:
        from trainprobe.op_check.online.training_side import OnlineJudge
        from trainprobe.op_check.training import HeldValues, StepJudge

        self.held = HeldValues(settings.max_bytes)
        elsewhere = settings.server is not None or settings.folder is not None
        plan = {
            **{"level": level, "task": "tensor", "step": settings.step, "rank": settings.rank, "sinks": ()},
            **{"statistics": (), "summary": "statistics" if elsewhere else "checksum"},
            **{"stacks": False, "console": False, "output": folder},
            **({} if on_error is None else {"on_error": on_error}),
        }
        super().__init__(plan, rename=rename)
        self._online = OnlineJudge(settings, self.held, say) if elsewhere else None
        if self.parts.collectives is not None:
            self.parts.collectives.keep_no_values()
        if self._online is None and self.parts.ops is not None:
            self.parts.ops.look_after()
        self.judge = self._online or StepJudge(settings, self.held, say, folder)
        self.watchers.append(lambda step_data: self.guard.part(PART, self._judged, step_data) or ())
        self.guard.of(PART).on_trip(self._judge_no_more)

    def _judge_no_more(self) -> None:
        """Collect no further step, because the judge has failed."""
        self.held.drop()
        self.program("dump").schedule = Schedule()
        self.scheduler.follow()

    def _judged(self, step_data: StepData) -> Sequence[Finding]:
        from trainprobe.engine.capture.random_state import put_back, random_state

        states = random_state()  # some operators draw numbers when they are judged
        try:
            if self.writer is not None:
                self.writer.flush()  # until then values may be on their way
            return self.judge(step_data) if step_data.complete else ()
        finally:
            put_back(states)
            self.held.drop()

    def _make_writer(self, place: Place) -> Writer:
        from trainprobe.engine.storage.writer import Writer

        if self._online is not None:
            self._online.start(place)
        return Writer({PART: self.held}, place=place, on_error=self.plan.on_error, report=self.findings.append)

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
            self.report(finding)

    def close(self) -> None:
        """Let go of everything; what was judged is the probe's last sentence."""
        if not self.closed and self.plan.wants_rank(self.place.rank):
            if self._online is not None:
                self.guard.run(self.guard.part, PART, self._report_arrived, self._online.close)
            self.sentences = [self.judge.summary()]
        elif not self.closed and self.place.rank == 0 and not any(map(self.plan.wants_rank, range(self.place.world_size))):
            there = f"ranks 0 to {self.place.world_size - 1}" if self.place.world_size > 1 else "rank 0 alone"
            self.sentences = [f"op_check: nothing was judged: the run has {there}, and rank is {list(self.plan.rank)}."]
        super().close()


class OpCheckProgram(Program):
    """Judges operators in the steps of a run, as the section `op_check` of its plan says.

    What it records has a probe of its own, with a tape and a guard: the whole values of the steps that it chooses are held
    for the judge alone. Its taps are installed before those of the run and removed after them.
    """

    def __init__(self, plan: Plan, rename: Rename | None) -> None:
        from trainprobe.op_check.plan import validate

        super().__init__(PART, Schedule(), part=PART)
        self._log: Log | None = None
        settings = validate(plan.op_check)
        self.probe = OpProbe(settings, self._say, plan.output / "op_check", on_error=plan.on_error, rename=rename)
        self.probe.guard.farewell = "op_check is given up, everything else goes on"

    def attached(self, probe: EngineProbe) -> None:
        """Report what is found to the run; where the run's probe stops, leave nothing installed."""
        self._run = probe
        self.probe.reporter.listeners.append(probe.report)
        probe.guard.of(PART).on_trip(self.probe.uninstall)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Learn the names of the model."""
        self.probe.open(model, optimizer, self._run.place)

    def begins(self, step: int) -> None:
        """Begin a step, before the taps of the run are installed."""
        self.probe.begin_step(step)

    def moment(self, name: str, *values: Any) -> None:
        """Follow the micro-batches."""
        self.probe.moment(name, *values)

    def paused(self) -> None:
        """Take no forward calls."""
        self.probe.pause()

    def resumed(self) -> None:
        """Take forward calls again."""
        self.probe.resume()

    def ended(self, step: int, complete: bool) -> None:
        """End the step and judge its operators. Raises StopTraining as the plan says."""
        if self._run.guard.tripped is not None:
            self.probe.uninstall()  # what torch held back while the fault came
        self.probe.end_step(complete=complete)

    def dropped(self) -> None:
        """Forget the step that had begun."""
        self.probe.drop_step()

    def closed(self) -> None:
        """Let go of everything, and have what was judged said at the end of the run."""
        self.probe.close()
        for sentence in self.probe.sentences:
            self._run.at_end(sentence)
        if self._log is not None:
            self._log.close()

    def _say(self, text: str) -> None:
        if self._log is None:
            self._log = Log(self._run.plan.output / f"rank{self._run.place.rank}" / LOG_FILE)
        self._log(text)


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
                self._file = open_private(self._path, "a", encoding="utf-8")
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
