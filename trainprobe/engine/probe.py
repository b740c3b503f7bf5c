"""The façade of the engine: six verbs, all that an integration may call.

    open(model, optimizer)     learn the model's names; nothing is installed
    begin_step(number)         a step begins; if it is collected, the taps are installed
    moment(name, …)            something happens inside the step: "micro", "optimizer", "optimizer_done" …
    note(name, value)          a scalar of the step: loss, lr, grad_norm …
    end_step()                 the taps are removed, the tape crosses to the host once, the writer gets the collected step
    close()                    everything is written; what could not be seen is said

`Probe` knows no tensor library and no framework: `trainprobe.build` composes it from a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainprobe.engine.capture import Tap, part_of
from trainprobe.engine.capture.pauses import Pauses
from trainprobe.engine.core.console import Console
from trainprobe.engine.core.findings import in_folder, recount
from trainprobe.engine.core.guard import Guard, all_of, attempt, fault_text
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.scope import selected, selects
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.core.unmatched import UnmatchedSelections
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Program, Wants, defines
from trainprobe.engine.storage.step_journal import Trail
from trainprobe.engine.tape import Tape
from trainprobe.errors import UsageError

if TYPE_CHECKING:
    from typing import Self


class Recorder(Protocol):
    """Where collected steps go: the background writer."""

    def submit(self, step_data: StepData) -> None:
        """Queue a collected step; waits when the queue is full, never drops."""
        ...

    def submit_findings(self, findings: Sequence[Finding]) -> None:
        """Queue findings."""
        ...

    def submit_counts(self, findings: Sequence[Finding]) -> None:
        """Queue findings that were handed over before and have been seen at more steps since."""
        ...

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything queued is written, at most `timeout_s` seconds."""
        ...

    def close(self) -> None:
        """Write everything and stop."""
        ...


Watcher = Callable[[StepData], Sequence[Finding]]


class Scheduled:
    """What runs in a step, worked out once for all steps of which the programs and their taps say the same.

    names: of the programs. level: what a dump of such a step records, where that is not the plan's level. looks: whether any
    program sees calls of the model.
    """

    __slots__ = ("level", "looks", "names", "taps")

    def __init__(self, programs: Sequence[Program] = (), taps: Iterable[Tap] = ()) -> None:
        self.taps = tuple(taps)
        self.names = tuple(program.name for program in programs)
        self.level = next((program.schedule.level for program in programs if program.schedule.level), "")
        self.looks = any(program.schedule.looks for program in programs)


class Probe:
    """Records the steps that its plan selects. Also usable as a context manager, which closes it."""

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[Program],
        new_tape: Callable[[int], Tape],
        guard: Guard,
        find_place: Callable[[], Place],
        open_recorder: Callable[[Place], Recorder],
        *,
        stacks: Stacks | None = None,
        framework: str = "pytorch",
        notes: Sequence[Callable[[], Sequence[str]]] = (),
        rests: Pauses | None = None,
    ) -> None:
        self.plan = plan
        self.guard = guard
        self.findings: list[Finding] = []
        self.console = Console(plan.console)
        self.collected = 0  # how many steps were collected and ended well
        self.sentences: list[str] = []  # at the end of the line that ends the run
        self._counts: dict[int, Finding] = {}  # place in `findings` → one that was counted and is not written yet
        self.watchers: list[Watcher] = []  # called behind the programs
        self.tape: Tape | None = None
        self.step_number = -1
        self.begun = 0  # how many steps began: numbers of steps may leave some out
        self.closed = False
        self.companions: list[Probe] = []  # go through the same steps, each with a plan and a guard of its own
        self._opened: tuple[Any, Callable[[], Any]] | None = None  # model, and what returns its optimizer
        self._taps: tuple[Tap, ...] = ()
        self._rests = rests or Pauses()  # the taps that are installed
        self._scheduled: dict[tuple[int, bool], Scheduled] = {}
        self._plans: dict[tuple[bool, ...], Scheduled] = {}  # by what was answered: whether extra, then of each who was asked
        self.programs = tuple(programs)
        self._install_schedules()
        self._running = Scheduled()
        self.new_tape = new_tape
        self._find_place = find_place
        self._open_recorder = open_recorder
        self._recorder: Recorder | None = None
        self._place: Place | None = None
        self._stacks = stacks
        self._framework = framework
        self._notes = tuple(notes)
        self._said: set[str] = set()
        self._moments: dict[str, list[Callable[..., None]]] = {}
        self._inside = False
        self._first_step: int | None = None
        self._extra_steps: set[int] = set()
        self._unmatched_selections = UnmatchedSelections(plan)
        guard._tell = self._tell
        guard.on_trip(self._release)
        for program in self.programs:
            program.attached(self)
        self._events = {event: self._at(event) for event in ("begins", "trail", "prepare", "judge", "decide", "ended")}

    # ---- the six verbs -----------------------------------------------------------------------------------------

    def open(self, model: Any, optimizer: Any = None, place: Place | None = None) -> Probe:
        """Learn the names of `model` (a module, or a list of model chunks); may be called again when the model has changed.

        Raises PlanError when a pattern of the plan matches nothing in the model, and OutputError when the output cannot be
        written. A model that cannot be looked at raises nothing: the training goes on without the tool.
        """
        if self.closed:
            raise UsageError("this probe is closed: make a new one with trainprobe.Probe(plan)")
        self.guard.set_up(self._open, model, optimizer, place)
        for companion in self.companions:
            companion.open(model, optimizer, place)
        return self

    def begin_step(self, number: int | None = None) -> bool:
        """Begin a step and tell whether it is collected.

        number: the framework's own step number; by default one more than the last.
        """
        if self._inside:
            raise UsageError(f"step {self.step_number} has not ended: call end_step() before begin_step()")
        self.step_number = self.step_number + 1 if number is None else number
        self._first_step = self.step_number if self._first_step is None else self._first_step
        self._inside = True
        self.begun += 1
        if self._events["begins"]:
            self.guard.run(self._step_begins)
        if not self.closed:
            self.guard.run(self._begin)
            for companion in self.companions:
                companion.begin_step(self.step_number)
        return self.tape is not None

    def moment(self, name: str, *values: Any) -> None:
        """Tell that something happens: "micro" (its index), "optimizer", "optimizer_done", "clip", "clip_done"."""
        for companion in self.companions:
            companion.moment(name, *values)
        if self.tape is None:
            return
        if name == "micro":
            self.guard.run(self._begin_micro, values[0])
        for listener in self._moments.get(name, ()):
            self.guard.run(listener, *values)

    def note(self, name: str, value: Any) -> None:
        """Keep a scalar of this step: a number, or a tensor of one element that is read when the step ends, not before."""
        if self.tape is not None:
            self.guard.run(self._note, self.tape, name, value)

    def end_step(self, *, complete: bool = True) -> StepData | None:
        """End the step; of a collected one, return the collected step that was handed to the writer.

        complete: False marks a step that an error cut short.

        Raises StopTraining, once all of the step is handed over, when a rule with the action "stop" found something.
        """
        try:
            for companion in self.companions:  # what they installed stands above what this one did
                companion.end_step(complete=complete)
        finally:
            step_data = self._end_step(complete)
        return step_data

    def _end_step(self, complete: bool) -> StepData | None:
        self._inside = False
        if self.guard.tripped is not None:
            self.guard.keep_on(self._release)  # what torch held back while the fault came
        try:
            if self.tape is None:
                return None
            self.guard.run(self._release, complete)
            return self.guard.run(self._finish, complete)
        finally:
            for program in self._events["ended"]:
                self.guard.of(program.part).undo(program.ended, self.step_number, complete)

    def drop_step(self) -> None:
        """Forget the step that has begun, as if it had not: it is neither written nor judged, and its number is free again."""
        for companion in self.companions:
            companion.drop_step()
        if self._inside:
            self._inside = False
            self.begun -= 1
            self.step_number -= 1
            self._first_step = self._first_step if self.begun else None
            self.guard.run(self._release)
            self.tape = None

    def close(self) -> None:
        """Write everything that is pending and say what was asked for and never came. Safe to call twice."""
        if self.closed:
            return
        if self._inside:
            self.end_step(complete=False)
        for companion in self.companions:
            companion.close()
            self.sentences += [s for s in companion.sentences if s not in self.sentences]
        self.guard.keep_on(self._release)
        self.closed = True
        for program in self._at("closing"):
            self.guard.run(self.guard.part, program.part, program.closing)
        self.guard.run(self._say_what_never_came)
        self.guard.run(self._write_counts)
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            self.guard.keep_on(recorder.close)

    # ---- for people --------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int | None = None) -> Generator[Probe]:
        """One optimizer step: forward, backward and update stand inside. What was collected before an error is written."""
        self.begin_step(number)
        try:
            yield self
        except BaseException:
            self.end_step(complete=False)
            raise
        self.end_step()

    def collect_next(self, steps: int = 1) -> None:
        """Collect the next `steps` steps whatever the plan says (a rule's action "dump")."""
        self._extra_steps.update(range(self.step_number + 1, self.step_number + 1 + steps))

    def at_end(self, sentence: str) -> None:
        """Add a sentence to the line that is printed when the run ends; the same sentence once."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def report(self, finding: Finding | None) -> None:
        """Keep, write and print a finding that somebody else made; nothing for None."""
        if finding is not None:
            self._tell(finding)

    @property
    def is_open(self) -> bool:
        """Whether something is written on this rank."""
        return self._recorder is not None

    def interrupted(self, error: BaseException) -> None:
        """Tell the programs that this error ends the training."""
        why = f"{type(error).__name__} ended the training after step {self.step_number}"
        for program in self._at("interrupted"):
            self.guard.run(self.guard.part, program.part, program.interrupted, why)

    def ask_anew(self) -> None:
        """Ask the programs anew what they want of the next step."""
        self._scheduled.clear()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything that was handed to the writer is on disk, at most `timeout_s` seconds."""
        if self._recorder is not None:
            self.guard.run(self._recorder.flush, timeout_s)

    def pause(self) -> None:
        """Stop taking forward calls until `resume`; gradients of what was recorded still arrive until the step ends."""
        for companion in self.companions:
            companion.pause()
        if self.tape is not None:
            self.guard.run(self._rests.begin, "the program")

    def resume(self) -> None:
        """Take forward calls again, where nothing else has them rest."""
        for companion in self.companions:
            companion.resume()
        if self.tape is not None:
            self.guard.run(self._rests.end, "the program")

    @property
    def place(self) -> Place:
        """This process's place in the job."""
        if self._place is None:
            self._place = self._find_place()
        return self._place

    def on(self, moment: str, listener: Callable[..., None]) -> None:
        """Call `listener` at each `moment` of collected steps (used when the probe is composed)."""
        self._moments.setdefault(moment, []).append(listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _open(self, model: Any, optimizer: Any, place: Place | None) -> None:
        self._place = place or self._place
        self._opened = (model, _held_weakly(optimizer))  # an optimizer that the training replaces is not kept
        for tap in self._taps:
            self._open_tap(tap, model, optimizer)
        busy = self.plan.level != "off" or any(program.schedule.taps for program in self.programs[1:])
        if self._recorder is None and busy and self.plan.wants_rank(self.place.rank):
            self._start_recording()  # now, so that a place that cannot be written is known before training

    def _start_recording(self) -> None:
        self._recorder = self._open_recorder(self.place)
        if self.plan.on_existing == "continue":
            for program in self._at("resumed"):
                self.guard.part(program.part, program.resumed)

    def _at(self, event: str) -> tuple[Program, ...]:
        """Return the programs that do something at an event."""
        return tuple(program for program in self.programs if defines(program, event))

    def _step_begins(self) -> None:
        for program in self._events["begins"]:
            self.guard.part(program.part, program.begins, self.step_number)

    def trail(self, step: int) -> Trail | None:
        """Return what the tape of a step is to tell while the step runs; nothing of a tape that is for no step."""
        programs = self._events["trail"] if step >= 0 else ()
        return next((self.guard.part(program.part, program.trail, step) for program in programs), None)

    def _install_schedules(self) -> None:
        """Follow the schedules of the programs from the next step on; taps that are new learn the model."""
        all_of(partial(tap.end, False) for tap in reversed(self._taps))  # some may wait for a step that is not wanted any more
        schedules = [program.schedule for program in self.programs]
        known, self._taps = self._taps, tuple(dict.fromkeys(tap for schedule in schedules for tap, _ in schedule.taps))
        for tap in self._taps:
            if tap not in known:
                self.guard.of(part_of(type(tap))).on_trip(partial(self._leave_out, tap))
                if self._opened is not None:
                    self._open_tap(tap, self._opened[0], self._opened[1]())
        self._asked = tuple(dict.fromkeys(wants for s in schedules for wants in (s.wants, *(wants for _, wants in s.taps))))
        self._scheduled.clear()
        self._plans.clear()

    def _open_tap(self, tap: Tap, model: Any, optimizer: Any) -> None:
        """Let a tap learn the model. A fault costs this tap alone; an error that the user has to mend is raised."""
        self.guard.of(part_of(type(tap))).set_up(tap.open, model, optimizer)

    def _leave_out(self, tap: Tap) -> None:
        """Let a tap that has failed listen no more."""
        self._rests.drop(tap)
        tap.end()

    def _begin(self) -> None:
        if self._wants(self.step_number):
            self._install()

    def _begin_micro(self, number: Any) -> None:
        if self.tape is not None:
            self.tape.micro, self.tape.micro_told = int(number), True

    def _note(self, tape: Tape, name: Any, value: Any) -> None:
        why = attempt(tape.note, name, value, otherwise=fault_text)
        if why is not None:
            told = name if isinstance(name, str) else f"a {type(name).__name__}"
            message = f"the value noted as {told!r} was left out: it is neither a number nor a tensor of one element ({why})"
            self._tell_once(Finding("probe", "warning", message, step=self.step_number), key=f"note {told}")

    def _install(self) -> None:
        if not self.plan.wants_rank(self.place.rank):
            return
        if self._recorder is None:
            self._start_recording()
        tape = self.tape = self.new_tape(self.step_number)
        self._running = self._schedule(self.step_number)
        self._rests.install(tap for tap in self._running.taps if not self._left_out(tap))
        for tap in self._running.taps:
            self.guard.part(part_of(type(tap)), tap.begin, tape)

    def _left_out(self, tap: Tap) -> bool:
        return self.guard.leaves_out(part_of(type(tap)))

    def _schedule(self, step: int) -> Scheduled:
        """Return the programs that want a step and the taps that run in it; asked once a step, for this one and the next."""
        extra = step in self._extra_steps
        known = self._scheduled.get((step, extra))
        if known is None:
            wanted = {wants: bool(wants(step)) for wants in self._asked}
            answers = (extra, *wanted.values())
            known = self._plans.get(answers)
            if known is None:
                known = self._plans[answers] = self._choose_taps(extra, wanted)
            self._scheduled = {key: value for key, value in self._scheduled.items() if key[0] == step - 1}
            self._scheduled[step, extra] = known
        return known

    def _choose_taps(self, extra: bool, wanted: Mapping[Wants, bool]) -> Scheduled:
        """Return what runs in a step of which these are the answers; extra: it is to be collected in full."""
        programs = [p for p in self.programs if wanted[p.schedule.wants] or (extra and p.schedule.asked)]
        schedules = [program.schedule for program in programs]
        whole = dict.fromkeys(tap for s in schedules for tap in s.asked) if extra else {}
        rest = {tap for s in schedules for tap in s.replaced} if whole else set[Tap]()
        taps = dict.fromkeys(tap for s in schedules for tap, wants in s.taps if wanted[wants] and tap not in rest)
        return Scheduled(programs, whole | taps)

    def _wants(self, step: int) -> bool:
        return bool(self._schedule(step).names)

    def _release(self, again: bool = False) -> None:
        if self.guard.tripped is not None:
            self.tape = None
        staying = self._schedule(self.step_number + 1).taps if again else ()
        all_of([*(partial(self._end, tap, tap in staying) for tap in reversed(self._taps)), self._rests.clear])

    def _end(self, tap: Tap, again: bool) -> None:
        self.guard.of(part_of(type(tap))).undo(tap.end, again and not self._left_out(tap))

    def _about_step(self) -> dict[str, Any]:
        notes = [note for source in self._notes for note in source() if note not in self._said]
        self._said.update(notes)
        detail = self.plan.base_detail
        return {
            "framework": self._framework,
            "level": self._running.level or self.plan.level,
            "task": self.plan.task,
            "wanted": detail.statistics if detail.wants_statistics else (),
            "stacks": self._stacks.text() if self._stacks is not None else (),
            "notes": tuple(notes),
            "programs": self._running.names,
        }

    def _finish(self, complete: bool) -> StepData | None:
        tape, self.tape = self.tape, None
        assert tape is not None and self._recorder is not None
        step_data = tape.harvest(self.step_number, self.place, complete=complete, **self._about_step())
        self._unmatched_selections.saw(step_data)
        if complete and self._running.looks and not step_data.calls and not step_data.scalars and not self._only_collects():
            self._tell_once(_saw_nothing(self.step_number), key="nothing was seen")
        self._say_faults(tape.library.faults())
        self.collected += complete
        found = self._judge(step_data)
        for finding in found:
            self._tell(finding)
        if selects(self.plan):
            step_data.calls, why = selected(step_data.calls, self.plan, self._framework)
            if why:
                self._tell_once(Finding("plan", "warning", why, step=step_data.step))
        self._recorder.submit(step_data)
        self._act(found)
        return step_data

    def _judge(self, step_data: StepData) -> list[Finding]:
        """Return what the programs find in a step; each may correct first what was recorded."""
        for program in self._events["prepare"]:
            self.guard.part(program.part, program.prepare, step_data)
        judged = [self.guard.part(program.part, program.judge, step_data) or () for program in self._events["judge"]]
        return [finding for found in (*judged, *(watch(step_data) for watch in self.watchers)) for finding in found]

    def _only_collects(self) -> bool:
        """Tell whether the step computed gradients that no update has used yet, so that a monitor has nothing to see."""
        return False

    def _act(self, found: Sequence[Finding]) -> None:
        """Do what the findings of a step ask for. Raises StopTraining when a rule wants the run to end."""
        for program in self._events["decide"]:
            steps, stop = self.guard.part(program.part, program.decide, found) or (0, None)
            if steps:
                self.collect_next(steps)
            if stop is not None:
                raise stop

    def _tell(self, finding: Finding) -> None:
        finding = in_folder(finding, self.plan.output)
        self.findings.append(finding)
        if self._recorder is not None:
            self._recorder.submit_findings([finding])
        self.console.report(finding)

    def count(self, seen: Sequence[Finding], step: int) -> list[Finding]:
        """Count findings that were made before and hold at this step too; return them as they are now."""
        now = recount(self.findings, seen, step)
        self._counts |= now
        if any(finding.count & (finding.count - 1) == 0 for finding in now.values()):  # the powers of two, and at the end
            self._write_counts()
        return list(now.values())

    def _write_counts(self) -> None:
        if self._recorder is not None and self._counts:
            self._recorder.submit_counts(list(self._counts.values()))
        self._counts.clear()

    def _tell_once(self, finding: Finding, key: str = "") -> None:
        key = key or finding.message
        if key not in self._said:
            self._said.add(key)
            self._tell(finding)

    def _say_what_never_came(self) -> None:
        for finding in self._unmatched_selections.findings(self._first_step, self.step_number, self.place):
            self._tell(finding)

    def _say_faults(self, faults: Sequence[str]) -> None:
        for fault in faults:
            self._tell_once(Finding("kernels", "warning", fault, step=self.step_number))


def _held_weakly(x: Any) -> Callable[[], Any]:
    """Return what returns x while it lives; a list of optimizers, say, is held."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x


def _saw_nothing(step: int) -> Finding:
    return Finding(
        rule="probe",
        severity="warning",
        step=step,
        message=f"step {step} was collected and nothing was seen: did forward and backward run between begin and end of the "
        "step, and was open() given the model that runs?",
    )
