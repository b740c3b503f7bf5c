"""Reports plan selections that matched nothing: names when the model is known, all else when the run ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from trainprobe.engine.core.records import Call, Finding, Place, StepData
from trainprobe.engine.core.step_data import entry_name, parameter_name
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import PlanError, did_you_mean


class Unmatched(NamedTuple):
    """A plan's field and its patterns that match nothing, each with the nearest name or None. must: they are refused."""

    field: str
    patterns: Sequence[tuple[str, str | None]]
    must: bool


def names_not_there(unmatched: Iterable[Unmatched], model: str, place: Place) -> Iterator[Finding]:
    """Yield what patterns match nothing in the part of the model that this process holds.

    Raises PlanError for what must match where that part is the whole model. On a stage of a pipeline a pattern may name what
    another stage holds: there it is a warning of one rank a stage, and for the others a note.
    """
    stage, stages = place.axes.get("pp", (0, 1))
    others = any(index for axis, (index, _) in place.axes.items() if axis not in ("pp", "vpp"))
    for field, patterns, must in unmatched:
        if not patterns:
            continue
        texts = ", ".join(f"{pattern!r} — did you mean {near!r}?" if near else repr(pattern) for pattern, near in patterns)
        message = f"the plan's {field} match nothing in {model}"
        if stages > 1:
            message += f", stage {stage} of a pipeline of {stages}: {texts}. Another stage may hold what is meant"
        else:
            message += f": {texts}"
            if must:
                raise PlanError(message)
        yield Finding("plan", "info" if stages > 1 and others else "warning", message, place=place)


class UnmatchedSelections:
    """Learns from the dumped steps which selections matched something."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._collected = False
        self._ops: set[str] = set()
        self._names: set[str] = set()  # of modules, parameters and ops
        self._parts: set[str] = set()  # names of calls, and their parts, for suggestions
        self._entries = dict.fromkeys(plan.entries, False)  # text → whether some call's full name held it

    def saw(self, step_data: StepData) -> None:
        """Learn from a step."""
        if not step_data.dumped:
            return
        self._collected = True
        if self._plan.ops != ("**",) or self._plan.tensors or self._plan.details:
            self._ops.update(call.name for call in step_data.calls if call.kind in ("op", "collective"))
            self._names.update(name for call in step_data.calls for name in _names(call))
        if not all(self._entries.values()):
            names = {entry_name(call, step_data.framework) for call in step_data.calls}
            self._entries |= {text: True for text in self._entries if any(text in name for name in names)}
            self._parts.update(part for call in step_data.calls for part in (call.name, *call.name.split(".")))

    def findings(self, first_step: int | None, last_step: int, place: Place) -> Iterator[Finding]:
        """Yield what never came, as warnings. first_step, last_step: of the run, collected or not; None where it had none."""
        if self._collected:
            yield from self._patterns()
        if first_step is None:
            return
        plan = self._plan
        if not any(map(plan.wants_rank, range(place.world_size))):
            there = f"ranks 0 to {place.world_size - 1}" if place.world_size > 1 else "rank 0 alone"
            yield _warning(f"no rank of the plan's rank {list(plan.rank)} is there: the run has {there}")
        pending = () if plan.level in ("off", "debug") else plan.pending_steps(last_step, first_step)
        if pending:
            yield _warning(
                f"the plan's step {', '.join(pending)} was never reached: the run had steps {first_step} to {last_step}"
            )

    def _patterns(self) -> Iterator[Finding]:
        for text in (text for text, seen in self._entries.items() if not seen):
            hint = did_you_mean(text, sorted(self._parts))
            yield _warning(f"the plan's entries {text!r} occurs in no call name of any collected step{hint}")
        level = self._plan.level
        asked = [("ops", "op", self._ops)] if level in ("L1", "mix") else []
        if level in ("L0", "L1", "mix"):
            asked += [(field, "module, parameter or op", self._names) for field in ("tensors", "details")]
        for field, what, names in asked:
            for pattern, near in self._plan.unmatched(names, field):
                hint = f"; did you mean {near!r}?" if near else ""
                yield _warning(f"the plan's {field} pattern {pattern!r} matched no {what} in any collected step{hint}")


def _names(call: Call) -> Iterator[str]:
    yield call.name
    yield from (parameter_name(call, short) for short in call.params or ())


def _warning(message: str) -> Finding:
    return Finding("plan", "warning", message)
