"""What a plan can ask of a run: the dump, the monitor, the audit, the black box, op_check. Each is one `Program`.

A program says which taps look at which steps (its `Schedule`), and is called at the events of a run that it defines, in the
order in which `Program` has them.

A fault of a program leaves out that program, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainprobe.engine.capture import Tap
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.storage.step_journal import StepJournal
from trainprobe.errors import StopTraining

if TYPE_CHECKING:
    from trainprobe.engine.core.guard import Guard
    from trainprobe.engine.core.naming import Rename
    from trainprobe.engine.core.unmatched import Unmatched
    from trainprobe.engine.plan.model import Plan
    from trainprobe.engine.probe import EngineProbe
    from trainprobe.engine.taps import Taps

Wants = Callable[[int], bool]


def always(step: int) -> bool:
    """Want each step."""
    return True


def each(every: int) -> Wants:
    """Return a function that wants every so-many-th step."""
    return lambda n: n % every == 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which taps of a program look at which steps.

    taps: each with the steps on which it is installed. asked: taps that record a step that is to be collected in full,
    whatever the plan says. replaced: taps of this program that rest in such a step, because those look at the same. level: what
    such a step's dump records, where that is not the plan's level. looks: whether any of it sees calls of the model. dumps:
    whether its taps record what the plan's level and task say. waits: whether no step is wanted until somebody asks for one.
    """

    wants: Wants = lambda step: False
    taps: tuple[tuple[Tap, Wants], ...] = ()
    asked: tuple[Tap, ...] = ()
    replaced: tuple[Tap, ...] = ()
    level: str = ""
    looks: bool = True
    dumps: bool = False
    waits: bool = False


class Program:
    """See the module text. Every event does nothing unless a program defines it.

    name: as in `StepData.programs`. part: as findings name it where it fails (see `engine.guard.Guard.of`).
    """

    def __init__(self, name: str, schedule: Schedule, part: str = "") -> None:
        self.name = name
        self.part = part or f"the {name}"
        self.schedule = schedule

    def attached(self, probe: EngineProbe) -> None:
        """The probe is composed; nothing is open yet."""

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """The model is known. declared: the caller gave this process's place in the job; otherwise it was detected."""

    def sinks(self, place: Place) -> Mapping[str, Any]:
        """Return sinks that get what the writer gets, by their names. Raises OutputError where one cannot be opened."""
        return {}

    def continued(self) -> None:
        """The writer is open, and the run continues an earlier one."""

    def changed(self, plan: Plan, schedule: Schedule) -> None:
        """The plan has changed between two steps, and when the taps of this program run."""
        self.schedule = schedule

    def unmatched(self, modules: Sequence[str], parameters: Sequence[str]) -> Iterable[Unmatched]:
        """Return what the plan selects for this program, each with its patterns that match none of these names."""
        return ()

    def accepts(self, plan: Plan) -> None:
        """The plan is to change between two steps. Raises PlanError where this program cannot go on with it."""

    def begins(self, step: int) -> None:
        """A step begins, whether it is collected or not; no tap is installed yet."""

    def journal(self, step: int) -> StepJournal | None:
        """Return what the tape of a collected step is to tell while the step runs."""
        return None

    def moment(self, name: str, *values: Any) -> None:
        """Something happens inside a step, collected or not (see `Probe.moment`)."""

    def paused(self) -> None:
        """The program that trains asks that no forward calls be taken until `resumed`."""

    def resumed(self) -> None:
        """Forward calls are taken again."""

    def at_once(self, step: int) -> bool:
        """Tell whether a collected step has to be judged as it ends, so that a device is waited for."""
        return False

    def collected(self) -> Callable[[StepData], object] | None:
        """A collected step has ended. Return what is called with it once its numbers have come, before `prepare`.

        The next steps may have begun by then, so that the function holds whatever of the program changes with a step.
        """

    def prepare(self, step_data: StepData) -> None:
        """A collected step has come to the host: correct what was recorded, before anything is judged or written."""

    def judge(self, step_data: StepData) -> Sequence[Finding]:
        """Return what is wrong with a collected step."""
        return ()

    def decide(self, found: Sequence[Finding]) -> tuple[int, StopTraining | None]:
        """Return how many next steps are to be collected in full, and whether the training is to stop."""
        return 0, None

    def ended(self, step: int, complete: bool) -> None:
        """A step has ended and its taps are removed; called also where the tool has stopped.

        complete: False where an error cut it short. May raise StopTraining.
        """

    def dropped(self) -> None:
        """The step that had begun is forgotten, as if it had not."""

    def interrupted(self, why: str) -> None:
        """An error ends the training."""

    def closing(self) -> None:
        """The run ends, and the writer is still open."""

    def closed(self) -> None:
        """The run has ended; called also where the tool has stopped: let go of everything."""


@dataclass(frozen=True, slots=True)
class Making:
    """What programs are made from.

    taps: those of the run. schedules: when they run, by the names of programs. backend: a `run.backend.Backend`. compose:
    returns taps and schedules of another plan, for a program that collects for itself. made: programs that are there
    already, by name.
    """

    plan: Plan
    taps: Taps
    schedules: Mapping[str, Schedule]
    backend: Any
    compose: Callable[[Plan, Guard, Rename | None], tuple[Taps, Mapping[str, Schedule]]]
    rename: Rename | None = None
    made: dict[str, Program] = field(default_factory=dict[str, "Program"])


class Programs:
    """The programs of a run in their order, called at the events that they define: what does nothing costs nothing."""

    def __init__(self, programs: Sequence[Program], guard: Guard) -> None:
        self._programs = tuple(programs)
        self._guard = guard
        self._defined: dict[str, tuple[Program, ...]] = {}  # by the name of an event

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs)

    def at(self, event: str) -> tuple[Program, ...]:
        """Return the programs that do something at an event."""
        known = self._defined.get(event)
        if known is None:
            nothing = getattr(Program, event)
            known = tuple(program for program in self._programs if getattr(type(program), event) is not nothing)
            self._defined[event] = known
        return known

    def call(self, event: str, *args: Any) -> None:
        """Call the programs at an event. A fault leaves out the program whose it is."""
        for program in self.at(event):
            self._guard.run(self._guard.part, program.part, getattr(program, event), *args)

    def call_in_any_case(self, event: str, *args: Any) -> None:
        """Call the programs at an event, also where the tool or the program has stopped."""
        for program in self.at(event):
            self._guard.of(program.part).keep_on(getattr(program, event), *args)
