"""The `op_check` section of a plan: chosen steps are collected with all values, and judged as each step ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainprobe.engine.capture.pauses import Pauses
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.core.unmatched import UnmatchedSelections
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.selection import parse_steps
from trainprobe.engine.probe import SAW_NOTHING, EngineProbe, saw_nothing
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.engine.scheduling import Scheduler
from trainprobe.engine.storage.safe_files import open_private
from trainprobe.errors import OutputError, StopTraining
from trainprobe.op_check.plan import OpCheckPlan, validate

if TYPE_CHECKING:
    from trainprobe.engine.plan.model import Plan
    from trainprobe.engine.storage.writer import Writer
    from trainprobe.engine.tape import Tape

PART = "op_check"
LOG_FILE = "op_check.txt"
Say = Callable[[str], None]


class OpCheckProgram(Program):
    """Judges operators in the steps of a run.

    It collects whole values for the judge alone, so it has a tape, taps and a guard of its own. Its taps are installed before
    those of the run and removed after them. Operators are those inside modules once a model is known, else all that run.
    """

    def __init__(self, making: Making) -> None:
        from trainprobe.op_check.training import HeldValues

        super().__init__(PART, Schedule(), part=PART)
        self.settings: OpCheckPlan = validate(making.plan.section(PART))
        self.held = HeldValues(self.settings.max_bytes)
        self.tape: Tape | None = None
        self._making = making
        self._elsewhere = self.settings.server is not None or self.settings.folder is not None
        self._guard = Guard(making.plan.on_error, without_dispatch=making.backend.without_dispatch)
        self._guard.farewell = "op_check is given up, everything else goes on"
        self._guard.on_trip(self._remove)
        self._dump = Program("dump", Schedule())
        self._scheduler = Scheduler([self._dump], self._guard, Pauses())
        self._plan: Plan | None = None  # what is collected; known once the first step begins or the model is
        self._writer: Writer | None = None
        self._step = -1
        self._log: Log | None = None
        self.tell(self._say, making.plan.output / "op_check")

    def tell(self, say: Say, folder: Path) -> None:
        """Say each line of the log by `say`, and write replays to `folder`; for a program that has not begun."""
        from trainprobe.op_check.online.training_side import OnlineJudge
        from trainprobe.op_check.training import StepJudge

        self._online = OnlineJudge(self.settings, self.held, say) if self._elsewhere else None
        self.judge_step = self._online or StepJudge(self.settings, self.held, say, folder)

    def attached(self, probe: EngineProbe) -> None:
        """Report what is found to the run; where the run's probe stops, leave nothing installed."""
        self._run = probe
        self._guard._on_finding = probe.report
        self._guard.of(PART).on_trip(self._judge_no_more)
        probe.guard.of(PART).on_trip(self.dropped)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Learn the names of the model."""
        self._guard.set_up(self._open, model, optimizer)

    def begins(self, step: int) -> None:
        """Begin a step, before the taps of the run are installed."""
        self._step = step
        self._guard.run(self._begin)

    def moment(self, name: str, *values: Any) -> None:
        """Follow the micro-batches."""
        if self.tape is not None and name == "micro":
            self._guard.run(self.tape.begin_micro, values[0])

    def paused(self) -> None:
        """Take no forward calls."""
        if self.tape is not None:
            self._guard.run(self._scheduler.pauses.begin, "the program")

    def resumed(self) -> None:
        """Take forward calls again."""
        if self.tape is not None:
            self._guard.run(self._scheduler.pauses.end, "the program")

    def ended(self, step: int, complete: bool) -> None:
        """End the step and judge its operators; report what a server has judged. Raises StopTraining as the plan says."""
        if self._run.guard.tripped is not None or self._guard.tripped is not None:
            self.dropped()  # what torch held back while the fault came
        if self.tape is not None:
            self._guard.run(self._remove, complete)
            self._guard.run(self._finish, complete)
        if self._online is not None:
            self._guard.run(self._guard.part, PART, self._report, self._online.arrived)
            self._guard.run(self._online.make_room)
            bug = self._online.must_stop()
            if bug:
                raise StopTraining(f"op_check: {bug}")

    def dropped(self) -> None:
        """Forget the step that had begun."""
        self._guard.keep_on(self._remove)
        self.tape = None

    def closed(self) -> None:
        """Let go of everything, and have what was judged said at the end of the run."""
        place, ranks = self._run.place, parse_steps(self.settings.rank)
        if place.rank in ranks:
            if self._online is not None:
                self._guard.run(self._guard.part, PART, self._report, self._online.close)
            self._run.at_end(self.judge_step.summary())
        elif place.rank == 0 and not any(rank in ranks for rank in range(place.world_size)):
            there = f"ranks 0 to {place.world_size - 1}" if place.world_size > 1 else "rank 0 alone"
            self._run.at_end(f"op_check: nothing was judged: the run has {there}, and rank is {list(self.settings.rank)}.")
        self._guard.keep_on(self._remove)
        self._guard.run(self._report, self._say_what_never_came)
        if self._writer is not None:
            self._guard.keep_on(self._writer.close)
        if self._log is not None:
            self._log.close()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _record(self, level: Literal["L1", "mix"]) -> Plan:
        """Make the taps, unless they are there; return the plan that says when they run."""
        if self._plan is not None:
            return self._plan
        from trainprobe.engine.capture.collectives import CollectiveTap
        from trainprobe.engine.capture.torch_ops import OpTap

        making, settings = self._making, self.settings
        fields = {
            **{"level": level, "task": "tensor", "step": settings.step, "rank": settings.rank, "sinks": ()},
            **{"statistics": (), "summary": "statistics" if self._elsewhere else "checksum", "stacks": False},
            **{"on_error": making.plan.on_error, "output": making.plan.output},
        }
        self._plan, self._level = load_plan(fields), level
        plan = self._plan
        self._never_came = UnmatchedSelections(plan)
        self._taps, schedules = making.compose(plan, self._guard, making.rename)
        collectives, ops = self._taps.get("collectives", CollectiveTap), self._taps.get("ops", OpTap)
        if collectives is not None:
            collectives.keep_no_values()
        if self._online is None and ops is not None:
            ops.look_after()
        self._new_tape = making.backend.tapes(plan, self._keep, self._keep_chunk, lambda step: None)
        self._dump.schedule = schedules["dump"]
        self._scheduler = Scheduler([self._dump], self._guard, self._taps.pauses)
        return plan

    def _open(self, model: Any, optimizer: Any) -> None:
        plan = self._record("mix")
        self._scheduler.open(model, optimizer)
        if plan.wants_rank(self._run.place.rank):
            self._start()

    def _start(self) -> None:
        """Start the thread that takes the values, and the link to the server."""
        from trainprobe.engine.storage.writer import Writer

        if self._writer is None:
            place = self._run.place
            if self._online is not None:
                self._online.start(place)
            on_error, report = self._making.plan.on_error, self._run.findings.append
            self._writer = Writer({PART: self.held}, place=place, on_error=on_error, report=report)

    def _begin(self) -> None:
        plan = self._record("L1")
        running = self._scheduler.at(self._step)
        if running.names and plan.wants_rank(self._run.place.rank):
            self._start()
            self.tape = tape = self._new_tape(self._step)
            self._scheduler.install(running, tape)

    def _remove(self, again: bool = False) -> None:
        """Remove the taps. again: those that the next step wants may stay, asleep."""
        if self._guard.tripped is not None:
            self.tape = None
        self._scheduler.remove(self._scheduler.at(self._step + 1).taps if again else ())

    def _finish(self, complete: bool) -> None:
        tape, self.tape = self.tape, None
        assert tape is not None
        about = {"framework": self._making.backend.name, "level": self._level, "task": "tensor", "programs": ("dump",)}
        step_data = tape.drain(self._step, self._run.place, complete=complete, statistics=(), notes=(), dumped=True, **about)
        self._never_came.saw(step_data)
        if complete and not step_data.calls and not step_data.scalars:
            self._run.reporter.report_once(saw_nothing(self._step), key=SAW_NOTHING)
        for fault in tape.library.faults():
            self._run.report_once(Finding("kernels", "warning", fault, step=self._step))
        for finding in self._guard.part(PART, self._judged, step_data) or ():
            self._run.report(finding)

    def _judged(self, step_data: StepData) -> Sequence[Finding]:
        from trainprobe.engine.capture.random_state import put_back, random_state

        states = random_state()  # some operators draw numbers when they are judged
        try:
            if self._writer is not None:
                self._writer.flush()  # until then values may be on their way
            return self.judge_step(step_data) if step_data.complete else ()
        finally:
            put_back(states)
            self.held.drop()

    def _say_what_never_came(self) -> Iterable[Finding]:
        return (
            ()
            if self._plan is None
            else self._never_came.findings(self._run.first_step, self._run.step_number, self._run.place)
        )

    def _judge_no_more(self) -> None:
        """Collect no further step, because the judge has failed."""
        self.held.drop()
        self._dump.schedule = Schedule()
        self._scheduler.follow()

    def _keep(self, key: str, t: Any, value: Any, cut: int) -> None:
        if self._writer is not None:
            copied = self._making.backend.copy(t, self._taps.cuts[cut - 1] if cut else None)
            self._writer.submit_tensor(self._step, key, copied)

    def _keep_chunk(self, chunk: Any) -> None:
        if self._writer is not None:
            self._writer.submit_chunk(self._step, chunk)

    def _report(self, found: Callable[[], Iterable[Finding]]) -> None:
        for finding in found():
            self._run.report(finding)

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
