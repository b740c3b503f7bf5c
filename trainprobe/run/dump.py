"""The dump: what the plan's level, task and step ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainprobe.engine.capture import StatesTap, Tap
from trainprobe.engine.capture.requests import flags_of, modules_of_plan, ops_of_plan
from trainprobe.engine.core.records import StepData
from trainprobe.engine.core.unmatched import Unmatched
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.engine.taps import Taps

_LEVELS = ("L0", "L1", "mix")  # those that record calls


def taps_of_dump(plan: Plan, taps: Taps) -> tuple[Tap, ...]:
    """Return the taps that a dump has, also one that is made only when a program asks for it."""
    level = taps.fullest if taps.dumps_when_asked else plan.level
    taps.records_update = "optimizer" in plan.phases
    saved = taps.saved(flags_of(plan.base_detail, taps.cuts))
    modules = taps.modules(modules_of_plan(plan, taps.cuts)) if level in ("L0", "mix") else None
    buffers = taps.buffers() if modules is not None else None
    calls = level in ("L1", "mix")
    ops = taps.ops(ops_of_plan(plan, taps.cuts)) if calls else None
    collectives = taps.collectives(flags_of(plan.base_detail, taps.cuts)) if calls else None
    stepping = taps.stepping()
    batches = taps.batches() if plan.section("black_box") and not plan.section("monitor") else None
    asked = (saved, modules, buffers, ops, collectives, stepping if level in _LEVELS else None, batches)
    return tuple(tap for tap in (taps.awaited(), *asked) if tap is not None)


def schedule(plan: Plan, taps: Taps, dump: Sequence[Tap]) -> Schedule:
    """Return when the taps of the dump run. What knows the model's names is begun only where another schedule has it."""
    pairs = (*((tap, plan.wants_step) for tap in dump), (taps.naming, _never))
    level = "" if not taps.dumps_when_asked else "mix" if taps.get("ops", Tap) is not None else "L0"
    return Schedule(plan.wants_step, pairs, asked=tuple(dump), level=level, dumps=True, waits=plan.level == "off")


def _never(step: int) -> bool:
    return False


class DumpProgram(Program):
    """Records what the plan's level, task and step ask for; its taps' values are written by the writer's sinks."""

    def __init__(self, making: Making) -> None:
        super().__init__("dump", making.schedules["dump"])
        self._plan, self._taps = making.plan, making.taps

    def collected(self) -> Callable[[StepData], object] | None:
        """Return what divides scaled gradients by the loss scale, before anything is judged or written."""
        states = self._taps.get("states", StatesTap)
        return states.unscaling() if states is not None else None

    def unmatched(self, modules: Sequence[str], parameters: Sequence[str]) -> Iterator[Unmatched]:
        """Yield the selections of modules and parameters."""
        if self._plan.level in ("L0", "mix"):
            for field, names in (("modules", modules), ("parameters", parameters)):
                yield Unmatched(field, self._plan.unmatched(names, field), must=True)
