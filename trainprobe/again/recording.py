"""What a run of a step showed: the fingerprint of each value of each call, in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trainprobe.engine.capture.collectives import CollectiveTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call, Place, StepData, Value
from trainprobe.engine.core.step_data import parameter_name, slots
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.engine.scheduling import Scheduler
from trainprobe.engine.tape import Tape

_RESULTS = ("output", "grad_input", "written")


class Key(NamedTuple):
    """A call, as every run of the step names it. within: the call of a module that an op ran in. number: counted there."""

    kind: str
    name: str
    phase: str
    number: int
    within: tuple[str, int] = ("", 0)

    def __str__(self) -> str:
        inside = f" of {self.within[0]}" if self.kind == "op" else ""
        passed = "backward of " if self.phase == "backward" and self.kind != "parameter" else ""
        again = f" (call {self.number})" if self.number else ""
        return f"{passed}{self.name}{again}{inside}"


@dataclass(slots=True)
class Shown:
    """What a call showed. parent: the call around it. given, made: slot → fingerprint, or a row of numbers.

    values: slot → the value itself.
    """

    key: Key
    parent: Key | None
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    made: dict[str, Any] = field(default_factory=dict[str, Any])
    values: dict[str, Value] = field(default_factory=dict[str, Value])


Run = dict[Key, Shown]


class Recorder:
    """Records every module, op and gradient of a step, by taps and a tape of its own that no writer gets.

    report: gets what is found wrong with the tool. `keep`, where it is set, gets (key, tensor) of each value that is looked at.
    """

    def __init__(self, making: Making, report: Callable[[Any], None]) -> None:
        fields = {
            **{"level": "mix", "task": "tensor", "summary": "checksum", "step": ("all",), "sinks": (), "statistics": ()},
            **{"stacks": False, "on_error": making.plan.on_error, "output": making.plan.output},
        }
        plan = load_plan(fields)
        self.guard = Guard(making.plan.on_error, without_dispatch=making.backend.without_dispatch)
        self.guard._on_finding = report
        self.keep: Callable[[str, Any], None] | None = None
        self._taps, schedules = making.compose(plan, self.guard, making.rename)
        collectives = self._taps.get("collectives", CollectiveTap)
        if collectives is not None:
            collectives.keep_no_values()
        self.library = making.backend.tapes(plan, self._keep, lambda chunk: None, lambda step: None)(0).library
        self._dump = Program("dump", Schedule())
        taps = [pair for pair in schedules["dump"].taps if pair[0] is not self._taps.stepping()]  # ops rest within an update
        self._dump.schedule = replace(schedules["dump"], taps=tuple(taps))
        self._scheduler = Scheduler([self._dump], self.guard, self._taps.pauses)
        self.tape: Tape | None = None

    def open(self, model: Any, optimizer: Any) -> None:
        """Learn the names of the model."""
        self._scheduler.open(model, optimizer)

    @property
    def names(self) -> dict[int, str]:
        """Id of parameter → its name."""
        return self._taps.naming.names()

    def begin(self) -> Tape:
        """Record from now on."""
        self.tape = Tape(self.library, self._keep)
        self._scheduler.install(self._scheduler.at(0), self.tape)
        return self.tape

    def drop(self) -> None:
        """Record no more, and forget what was recorded."""
        self._scheduler.remove()
        self.tape = None

    def end(self, step: int, place: Place) -> tuple[Run, StepData]:
        """Record no more; return what was recorded, once its numbers are on the host."""
        assert self.tape is not None
        tape = self.tape
        self.drop()
        about = {"framework": "pytorch", "level": "mix", "task": "tensor", "statistics": (), "notes": (), "programs": ("dump",)}
        step_data = tape.drain(step, place, **about)
        return run_of(step_data), step_data

    def _keep(self, key: str, t: Any, value: Value, cut: int) -> None:
        if self.keep is not None:
            self.keep(key, t)


def run_of(step_data: StepData) -> Run:
    """Return what a collected step showed inside modules; what ran outside of them, such as the loss, is left out.

    Ops are counted within the call of their module, so that what runs between two calls of the model shifts no number.
    """
    found: Run = {}
    for key, values, parent in _keyed(step_data.calls):
        shown = found.get(key)
        if shown is None:
            shown = found[key] = Shown(key, parent)
        for slot, value in values:
            if value.row < 0 or step_data.checksums is None:
                continue
            side = shown.made if slot.startswith(_RESULTS) or key.kind == "parameter" else shown.given
            side[slot] = int(step_data.checksums[value.row])
            shown.values[slot] = value
    return found


def parameter_of(key: Key, slot: str) -> str:
    """Return the whole name of the parameter that a call of its module showed in a slot."""
    short = slot.removeprefix("parameters.")
    return short if key.name in ("", ROOT) else f"{key.name}.{short}"


def _keyed(calls: Sequence[Call]) -> Iterator[tuple[Key, Iterable[tuple[str, Value]], Key | None]]:
    """Yield the key of each call, its values by slot, and the key of the call around it."""
    counts: dict[tuple[str, ...], int] = {}
    forwards: dict[tuple[str, int], Key] = {}  # of ops
    for call in calls:
        around = call.parent if isinstance(call.parent, Call) else None
        parent = None if around is None else Key("module", around.name, around.phase, around.call)
        if call.kind == "module":
            yield Key("module", call.name, call.phase, call.call), slots(call), parent
        elif call.kind == "parameter":
            for short, value in (call.params or {}).items():
                name = parameter_name(call, short)
                yield Key("parameter", name, "backward", _counted(counts, "parameter", name)), [("grad", value)], None
        elif call.kind == "op" and call.phase == "backward":
            forward = forwards.get((call.name, call.call))
            if forward is not None:
                yield forward._replace(phase="backward"), slots(call), forward._replace(phase="backward")
        elif call.kind == "op" and around is not None:
            within = around.name, around.call
            number = _counted(counts, call.phase, call.name, *map(str, within))
            key = Key("op", call.name, call.phase, number, within)
            if call.phase == "forward":
                forwards[call.name, call.call] = key
            yield key, slots(call), parent


def _counted(counts: dict[tuple[str, ...], int], *key: str) -> int:
    counts[key] = counts.get(key, -1) + 1
    return counts[key]
