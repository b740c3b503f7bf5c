"""The façade of the engine: seven verbs, all that an integration may call.

    open(model, optimizer)     learn the model's names; nothing is installed
    begin_step(number)         a step begins; if it is collected, the taps are installed
    moment(name, …)            something happens inside the step: "micro", "optimizer", "optimizer_done" …
    note(name, value)          a scalar of the step: loss, lr, grad_norm …
    tell(name, number)         the same, also once the step has ended and the next has not begun
    end_step()                 the taps are removed, the tape crosses to the host once, the writer gets the collected step
                               (of a device, with a later step, once its numbers are there)
    close()                    everything is written; what could not be seen is reported

What a plan asks for are its programs (`engine.program`); the scheduler installs their taps (`engine.scheduling`).
`EngineProbe` knows no tensor library and no framework: `trainprobe.run.probe.Probe` is composed from a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainprobe.engine.capture.pauses import Pauses
from trainprobe.engine.core.findings import Console, Reporter
from trainprobe.engine.core.guard import Guard, attempt, fault_text
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.scope import selected, selects
from trainprobe.engine.core.stacks import Stacks, used_by
from trainprobe.engine.core.unmatched import UnmatchedSelections
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Program, Programs
from trainprobe.engine.scheduling import Scheduled, Scheduler
from trainprobe.engine.storage.step_journal import StepJournal
from trainprobe.engine.tape import Tape
from trainprobe.engine.waiting_steps import WaitingStep, WaitingSteps
from trainprobe.errors import UsageError

if TYPE_CHECKING:
    from typing import Self

    from trainprobe.engine.storage.writer import Writer

Watcher = Callable[[StepData], Sequence[Finding]]
SAW_NOTHING = "nothing was seen"  # what `report_once` knows such a warning by


class EngineProbe:
    """Records the steps that its plan selects. Also usable as a context manager, which closes it.

    programs: what the plan asks for. new_tape: makes the tape of a step. find_place: learns where this process stands.
    open_writer: opens what gets the collected steps. notes: return what could not be seen, and why.
    """

    at_once = False  # each step is judged as it ends: a device is waited for

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[Program],
        new_tape: Callable[[int], Tape],
        guard: Guard,
        find_place: Callable[[], Place],
        open_writer: Callable[[Place], Writer],
        *,
        stacks: Stacks | None = None,
        framework: str = "pytorch",
        notes: Sequence[Callable[[], Sequence[str]]] = (),
        pauses: Pauses | None = None,
    ) -> None:
        self.plan = plan
        self.guard = guard
        self.reporter = Reporter(Console(plan.console), plan.output)
        self.collected = 0  # how many steps were collected and ended well
        self.cut_short = 0  # how many steps were collected and did not end well
        self.sentences: list[str] = []  # at the end of the line that ends the run
        self.recorded = ""  # how many steps were recorded, where some were lost; known at the end
        self.watchers: list[Watcher] = []  # called behind the programs
        self.tape: Tape | None = None
        self.step_number = -1
        self.begun = 0  # how many steps began: numbers of steps may leave some out
        self.closed = False
        self.programs = Programs(programs, guard)
        self.scheduler = Scheduler(programs, guard, pauses or Pauses())
        self.new_tape = new_tape
        self._running = Scheduled()
        self._find_place = find_place
        self._open_writer = open_writer
        self._place: Place | None = None
        self._stacks = stacks
        self._framework = framework
        self._notes = tuple(notes)
        self._listeners: dict[str, list[Callable[..., None]]] = {}
        self._inside = False
        self._stores = False  # the step that has begun hands values to the writer, which takes step after step
        self.more_is_told = False  # `tell` is called between two steps
        self._waiting = WaitingSteps(self._judge, self._submit, self._act, guard.part)
        self._awaiting: dict[str, float] = {}  # numbers for the next step that is collected
        self._waits = False  # such numbers came between two steps
        self.first_step: int | None = None  # that began
        self._unmatched_selections = UnmatchedSelections(plan)
        guard._on_finding = self.report
        guard.on_trip(self._hand_over_unjudged)
        guard.on_trip(self._remove)
        for program in programs:
            program.attached(self)

    # ---- the seven verbs -----------------------------------------------------------------------------------------

    def open(self, model: Any, optimizer: Any = None, place: Place | None = None) -> Self:
        """Learn the names of `model` (a module, or a list of model chunks); may be called again when the model has changed.

        Raises PlanError when a pattern of the plan matches nothing in the model, and OutputError when the output cannot be
        written. A model that cannot be looked at raises nothing: the training goes on without the tool.
        """
        if self.closed:
            raise UsageError("this probe is closed: make a new one with trainprobe.Probe(plan)")
        self.guard.set_up(self._open, model, optimizer, place)
        return self

    def begin_step(self, number: int | None = None) -> bool:
        """Begin a step and tell whether it is collected.

        number: the framework's own step number; by default one more than the last.
        """
        if self._inside:
            raise UsageError(f"step {self.step_number} has not ended: call end_step() before begin_step()")
        if self._waiting:
            self.guard.run(self._waiting.settle)
        self._waiting.begins()
        self.step_number = self.step_number + 1 if number is None else number
        self.first_step = self.step_number if self.first_step is None else self.first_step
        self._inside = True
        self.begun += 1
        if not self.closed:
            self.guard.run(self._begin)
        return self.tape is not None

    def moment(self, name: str, *values: Any) -> None:
        """Tell that something happens: "micro" (its index), "optimizer", "optimizer_done", "clip", "clip_done"."""
        self.programs.call("moment", name, *values)
        if self.tape is None:
            return
        if name == "micro":
            self.guard.run(self.tape.begin_micro, values[0])
        for listener in self._listeners.get(name, ()):
            self.guard.run(listener, *values)

    def note(self, name: str, value: Any) -> None:
        """Keep a scalar of this step: a number, or a tensor of one element that is read when the step ends, not before."""
        if self.tape is not None:
            self.guard.run(self._note, self.tape, name, value)

    def note_soon(self, name: str, number: float) -> None:
        """Keep a number of this step; between steps, or where none is collected, of the next one that is."""
        if self.tape is not None:
            self.note(name, number)
        else:
            self._awaiting[name] = number
            self._waits = True  # where no step follows, it stands with the last one

    def tell(self, name: str, number: float) -> bool:
        """Keep a number of the step that has begun, or of the last one until the next begins, beside what was noted of it.

        Returns False where it comes too late: its step has been handed to the writer.
        """
        return self._waiting.tell(name, number)

    def end_step(self, *, complete: bool = True, more: bool = False) -> StepData | None:
        """End the step; of a collected one, return the collected step that was handed to the writer.

        complete: False marks a step that an error cut short. more: where `more_is_told`, the step waits for the next one to
        begin. Returns None too while the numbers come from a device: the step is judged and handed over when a later one
        begins or ends, or by `settle`, `flush` and `close`. None is waited for, unless the step is audited, stores values or
        was cut short, or a rule may stop the run.

        Raises StopTraining, once all of the step is handed over, when a rule with the action "stop" found something.
        """
        self._inside = False
        if self.guard.tripped is not None:
            self.guard.keep_on(self._remove)  # what torch held back while the fault came
        try:
            if self.tape is None:
                if self._waiting:
                    self.guard.run(self._waiting.settle)
                return None
            self.guard.run(self._remove, complete)
            return self.guard.run(self._finish, complete, more and (self.more_is_told or self._waits))
        finally:
            self.programs.call_in_any_case("ended", self.step_number, complete)

    def drop_step(self) -> None:
        """Forget the step that has begun, as if it had not: it is neither written nor judged, and its number is free again."""
        if self._inside:
            self._inside = False
            self.begun -= 1
            self.step_number -= 1
            self.first_step = self.first_step if self.begun else None
            self.uninstall()
            self.programs.call_in_any_case("dropped")

    def uninstall(self) -> None:
        """Remove everything that is installed, at any moment; of a step that is under way nothing is collected."""
        self.guard.keep_on(self._remove)
        self.tape = None

    def close(self) -> None:
        """Write everything that is pending and say what was asked for and never came. Safe to call twice."""
        if self.closed:
            return
        if self._inside:
            self.end_step(complete=False)
        self.guard.keep_on(self._remove)
        for name, number in self._awaiting.items():  # no step follows
            if not self.tell(name, number):
                self.at_end(f"{name} was {number:g} after the last step, and no row has it.")
        self.settle()
        self.closed = True
        self.programs.call("closing")
        self.guard.run(self._say_what_never_came)
        self.guard.run(self.reporter.write_counts)
        writer, self.reporter.writer = self.writer, None
        if writer is not None:
            self.guard.keep_on(writer.close)
            self.recorded = writer.counts.sentence()
        self.programs.call_in_any_case("closed")

    # ---- for people --------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int | None = None) -> Generator[Self]:
        """One optimizer step: forward, backward and update stand inside. What was collected before an error is written."""
        self.begin_step(number)
        try:
            yield self
        except BaseException:
            self.end_step(complete=False)
            raise
        self.end_step(more=True)

    def collect_next(self, steps: int = 1) -> None:
        """Collect the next `steps` steps whatever the plan says (a rule's action "dump")."""
        self.scheduler.collect(range(self.step_number + 1, self.step_number + 1 + steps))

    def at_end(self, sentence: str) -> None:
        """Add a sentence to the line that is printed when the run ends; the same sentence once."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def report(self, finding: Finding | None) -> None:
        """Keep, write and print a finding; nothing for None."""
        if finding is not None:
            self.reporter.report(finding)

    def report_once(self, finding: Finding) -> None:
        """Report a finding, unless one with this message was reported before."""
        self.reporter.report_once(finding)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return self.reporter.findings

    @property
    def console(self) -> Console:
        """What prints."""
        return self.reporter.console

    @property
    def writer(self) -> Writer | None:
        """What gets the collected steps of this rank: there once the output is open, until the run ends."""
        return self.reporter.writer

    @property
    def framework(self) -> str:
        """The name of the framework, as dumps have it."""
        return self._framework

    @property
    def place(self) -> Place:
        """This process's place in the job."""
        if self._place is None:
            self._place = self._find_place()
        return self._place

    def interrupted(self, error: BaseException) -> None:
        """Tell the programs that this error ends the training."""
        self.settle()
        when = f"after step {self.step_number}" if self.step_number >= 0 else "before its first step"
        self.programs.call("interrupted", f"{type(error).__name__} ended the training {when}")

    def settle(self) -> None:
        """Wait for the numbers that are still on their way from a device; judge their steps and hand them to the writer."""
        if self._waiting:
            self.guard.run(self._waiting.settle, True)

    @property
    def running(self) -> Sequence[str]:
        """The names of the programs that want the step, of the last one where none is under way."""
        return self._running.names

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything that was handed to the writer is on disk, at most `timeout_s` seconds."""
        if self.writer is not None:
            self.guard.run(self.writer.flush, timeout_s)

    def pause(self) -> None:
        """Stop taking forward calls until `resume`; gradients of what was recorded still arrive until the step ends."""
        self.programs.call("paused")
        if self.tape is not None:
            self.guard.run(self.scheduler.pauses.begin, "the program")

    def resume(self) -> None:
        """Take forward calls again, where nothing else has them rest."""
        self.programs.call("resumed")
        if self.tape is not None:
            self.guard.run(self.scheduler.pauses.end, "the program")

    def on(self, moment: str, listener: Callable[..., None]) -> None:
        """Call `listener` at each `moment` of collected steps (used when the probe is composed)."""
        self._listeners.setdefault(moment, []).append(listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close; an error that ends the training has the black box written out."""
        if error and isinstance(error[1], BaseException):
            self.interrupted(error[1])
        self.close()

    # ---- the programs ------------------------------------------------------------------------------------------

    def journal(self, step: int) -> StepJournal | None:
        """Return what the tape of a step is to tell while the step runs; nothing of a tape that is for no step."""
        programs = self.programs.at("journal") if step >= 0 else ()
        return next((self.guard.part(program.part, program.journal, step) for program in programs), None)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _open(self, model: Any, optimizer: Any, place: Place | None) -> None:
        self._place = place or self._place
        self.scheduler.open(model, optimizer)
        busy = any(program.schedule.taps and not program.schedule.waits for program in self.programs)
        if self.writer is None and busy and self.plan.wants_rank(self.place.rank):
            self._start_recording()  # now, so that a place that cannot be written is known before training

    def _start_recording(self) -> None:
        self.reporter.writer = self._open_writer(self.place)
        self.reporter.writer.hand_in = self.settle
        if self.plan.on_existing == "continue":
            self.programs.call("continued")

    def _begin(self) -> None:
        for program in self.programs.at("begins"):
            self.guard.part(program.part, program.begins, self.step_number)
        self._stores = False
        running = self.scheduler.at(self.step_number)
        if running.names and self.plan.wants_rank(self.place.rank):
            if self.writer is None:
                self._start_recording()
            self._running = running
            self.tape = self.new_tape(self.step_number)
            for name, number in self._awaiting.items():
                self._note(self.tape, name, number)
            self._awaiting.clear()
            self.scheduler.install(running, self.tape)

    def _note(self, tape: Tape, name: Any, value: Any) -> None:
        why = attempt(tape.note, name, value, otherwise=fault_text)
        if why is not None:
            shown = name if isinstance(name, str) else f"a {type(name).__name__}"
            message = f"the value noted as {shown!r} was left out: it is neither a number nor a tensor of one element ({why})"
            self.reporter.report_once(Finding("probe", "warning", message, step=self.step_number), key=f"note {shown}")

    def _remove(self, again: bool = False) -> None:
        """Remove the taps. again: those that the next step wants may stay, asleep."""
        if self.guard.tripped is not None:
            self.tape = None
        self.scheduler.remove(self.scheduler.at(self.step_number + 1).taps if again else ())

    def _about_step(self) -> dict[str, Any]:
        detail = self.plan.base_detail
        return {
            "framework": self._framework,
            "level": self._running.level or self.plan.level,
            "task": self.plan.task,
            "statistics": detail.statistics if detail.wants_statistics else (),
            "notes": tuple(note for source in self._notes for note in source() if self.reporter.is_new(note)),
            "programs": self._running.names,
            "dumped": self._running.dumped,
        }

    def _finish(self, complete: bool, more: bool) -> StepData | None:
        tape, self.tape = self.tape, None
        assert tape is not None
        number = self.step_number
        sent = tape.send(number, self.place, complete=complete, **self._about_step())
        looks = complete and self._running.looks and not self._only_collects()
        made = [(program.part, self.guard.part(program.part, program.collected)) for program in self.programs.at("collected")]
        prepare = [(part, call) for part, call in made if call is not None]
        prepare += [(program.part, program.prepare) for program in self.programs.at("prepare")]
        self._waiting.add(number, sent, looks, prepare)
        wait = not complete or self._stores or self.at_once
        wait = wait or any(self.guard.part(p.part, p.at_once, number) for p in self.programs.at("at_once"))
        return None if more and not wait else self._waiting.settle(wait, number if more else None)

    def _hand_over_unjudged(self) -> None:
        """Hand over what was collected before a fault disabled the tool."""
        for step_data in self._waiting.unjudged() if self.writer is not None else ():
            if selects(self.plan):
                step_data.change(calls=selected(step_data.calls, self.plan, self._framework)[0])
            self._submit(step_data)

    def _submit(self, step_data: StepData) -> None:
        if self.writer is not None:
            self.writer.submit(step_data)

    def _judge(self, step: WaitingStep, step_data: StepData) -> list[Finding]:
        """Report what is found in a step, and drop what its plan does not select; return the findings of the programs."""
        if self._stacks is not None:
            step_data.stacks = used_by(step_data.calls, self._stacks.text())
        self._unmatched_selections.saw(step_data)
        if step.looks and not step_data.calls and not step_data.scalars:
            self.reporter.report_once(saw_nothing(step.number), key=SAW_NOTHING)
        for fault in step.sent.library.faults():
            self.reporter.report_once(Finding("kernels", "warning", fault, step=step.number))
        self.collected += step_data.complete
        self.cut_short += not step_data.complete
        found = self._found(step_data)
        for finding in found:
            self.report(finding)
        if selects(self.plan):
            calls, why = selected(step_data.calls, self.plan, self._framework)
            step_data.change(calls=calls)
            if why:
                self.reporter.report_once(Finding("plan", "warning", why, step=step_data.step))
        return found

    def _found(self, step_data: StepData) -> list[Finding]:
        """Return what the programs find in a step."""
        judged = [self.guard.part(program.part, program.judge, step_data) or () for program in self.programs.at("judge")]
        return [finding for found in (*judged, *(watch(step_data) for watch in self.watchers)) for finding in found]

    def _store(self) -> None:
        """Values of the step go to the writer from now on, which is given the steps before it first."""
        self._stores = True
        self.settle()

    def _only_collects(self) -> bool:
        """Tell whether the step computed gradients that no update has used yet, so that a monitor has nothing to see."""
        return False

    def _act(self, found: Sequence[Finding]) -> None:
        """Do what the findings of a step ask for. Raises StopTraining when a rule wants the run to end."""
        for program in self.programs.at("decide"):
            steps, stop = self.guard.part(program.part, program.decide, found) or (0, None)
            if steps:
                self.collect_next(steps)
            if stop is not None:
                raise stop

    def _say_what_never_came(self) -> None:
        for finding in self._unmatched_selections.findings(self.first_step, self.step_number, self.place):
            self.report(finding)


def saw_nothing(step: int) -> Finding:
    """Return the warning of a collected step in which no call was seen."""
    return Finding(
        rule="probe",
        severity="warning",
        step=step,
        message=f"step {step} was collected and nothing was seen: did forward and backward run between begin and end of the "
        "step, and was open() given the model that runs?",
    )
