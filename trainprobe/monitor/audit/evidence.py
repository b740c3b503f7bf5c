"""What a relation judges: the host facts of one step of one rank, those of the step before, and those of the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Finding, Place, Site, StepData
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import column
from trainprobe.monitor.audit.facts import Facts, T
from trainprobe.monitor.audit.facts.calls import DependentScalars, TrainingCalls
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.facts.model import ModelFacts, TrainingState
from trainprobe.monitor.audit.facts.saves import Save
from trainprobe.monitor.audit.facts.updates import BufferStates, UpdateCounts, UsedGroups
from trainprobe.monitor.audit.peers import Key, Peer
from trainprobe.monitor.audit.resharded import Resharded
from trainprobe.monitor.scalar_names import role_of

if TYPE_CHECKING:
    from trainprobe.monitor.audit.plan import AuditPlan

F64 = npt.NDArray[np.float64]
HALF_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # how far a number is from what it is rounded to, relative


@dataclass(frozen=True, slots=True, eq=False)
class TensorsOfStep:
    """The numbers of every tensor of every parameter in one step: (name, slot) → row; arrays [rows].

    Slots: value, main_value, grad_unclipped, grad, exp_avg …, and each but gradients with `_after` behind it for after the
    update. dtypes: plain names, `float32`. replicas: (name, slot) → axes over which its source says that this tensor is
    replicated (only where it says): a gradient may be cut over ranks that all hold the whole value. pieces: (name, slot) → the
    rectangle of it that is here, as text, empty for the whole (only where it says).
    """

    rows: Mapping[Key, int] = field(default_factory=dict[Key, int])
    partials: F64 = field(default_factory=lambda: np.zeros((0, 12)))
    checksums: npt.NDArray[np.uint64] | None = None
    dtypes: Mapping[Key, str] = field(default_factory=dict[Key, str])
    replicas: Mapping[Key, frozenset[str]] = field(default_factory=dict[Key, frozenset[str]])
    names: tuple[str, ...] = ()
    pieces: Mapping[Key, str] = field(default_factory=dict[Key, str])
    _numbers: dict[str, F64] = field(default_factory=dict[str, F64])

    def __contains__(self, key: Key) -> bool:
        return key in self.rows

    def number(self, name: str, slot: str, statistic: str) -> float:
        """Return a statistic of `engine.stats`, or the column "sum" or "sumsq"; NaN for what is not there."""
        row = self.rows.get((name, slot))
        if row is None:
            return float("nan")
        return float(self._column(statistic)[row])

    def checksum(self, name: str, slot: str) -> int | None:
        """Return the fingerprint, or None where none was taken."""
        row = self.rows.get((name, slot))
        if row is None or self.checksums is None:
            return None
        number = int(self.checksums[row])
        return number if number or self.partials[row, 0] == 0 else None

    def half_unit(self, *slots: str) -> float:
        """Return the largest relative rounding of the formats that these slots have, 0 where all have 32 bits or more."""
        kinds = {dtype for (_, slot), dtype in self.dtypes.items() if slot in slots}
        return max((HALF_UNITS.get(kind, 0.0) for kind in kinds), default=0.0)

    def slots(self, name: str) -> list[str]:
        """Return the slots of a parameter."""
        return [slot for owner, slot in self.rows if owner == name]

    def with_slot(self, slot: str) -> Iterator[str]:
        """Yield the parameters that have a slot, in the order of the model."""
        return (name for name in self.names if (name, slot) in self.rows)

    def _column(self, statistic: str) -> F64:
        found = self._numbers.get(statistic)
        if found is None:
            raw = statistic in ("sum", "sumsq")
            found = column(self.partials, statistic) if raw else finish(self.partials, (statistic,))[statistic]
            self._numbers[statistic] = found
        return found


def tensors_of(step_data: StepData) -> TensorsOfStep:
    """Return what a collected step says about parameters around the optimizer step."""
    rows: dict[Key, int] = {}
    dtypes: dict[Key, str] = {}
    replicas: dict[Key, frozenset[str]] = {}
    names: dict[str, None] = {}
    pieces: dict[Key, str] = {}
    for call in step_data.calls:
        if call.kind != "state":
            continue
        for slot, value in (call.params or {}).items():
            if getattr(value, "row", -1) < 0:
                continue
            names[call.name] = None
            rows[call.name, slot] = value.row
            dtypes[call.name, slot] = value.dtype.rpartition(".")[2].lower()
            shard = (value.extra or {}).get("shard")
            if shard is not None:
                replicas[call.name, slot] = frozenset(shard["replicas"])
                pieces[call.name, slot] = _rectangle(shard)
    return TensorsOfStep(rows, step_data.partials, step_data.checksums, dtypes, replicas, tuple(names), pieces)


def _rectangle(shard: Mapping[str, Any]) -> str:
    if shard["shape"] == shard["whole"]:
        return ""
    within = shard.get("within")
    return f"{shard['offset']}{shard['shape']}{_rectangle(within) if within is not None else ''}"


@dataclass(frozen=True, slots=True)
class Streak:
    """A value that was the same at so many audited steps in a row. since: the first of them, as `Evidence.ordinal`."""

    value: float | bool
    count: int
    since: int


@dataclass(frozen=True, slots=True)
class AuditHistory:
    """What the audited steps before have shown of this training, as far as several relations need it.

    What one relation alone needs of them is in `Evidence.memory`. handed_over: parameters that the optimizers of some ranks of
    a replica group step and others do not, as the ranks reported last. driven: parameter that nothing here trains → steps in a
    row at which something had moved it, -1 where it stood still at first (and all of the same child of the model with it).
    streaks: ("scalar", name), ("rate", parameter group), ("unreached", parameter) or ("moves", buffer) → what it was last (see
    `streaks_now`). peaks: largest rate of each parameter group.
    """

    handed_over: frozenset[str] = frozenset()
    driven: Mapping[str, int] = field(default_factory=dict[str, int])
    streaks: Mapping[tuple[str, str], Streak] = field(default_factory=dict[tuple[str, str], Streak])
    peaks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the relations may look at; nothing in it can be changed, and nothing of it is on a device."""

    step: int
    """The number of the step."""
    place: Place
    """This rank."""
    facts: Facts
    """What the observers established: ask by `of`."""
    tensors: TensorsOfStep
    """Parameters, gradients and optimizer states around the update."""
    plan: AuditPlan
    """The `audit` section of the plan."""
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the program reported: loss, gradient norm …"""
    before: Evidence | None = None
    """Of the audited step before this one, without its own `before`."""
    peers: tuple[Peer, ...] = ()
    """Every rank, this one included; empty where ranks were not compared."""
    replicated: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Parameter, "buffer NAME" or "begun NAME" → axes over which its value is replicated; `over` answers for each tensor."""
    norms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Logical norm of all gradients over all ranks, "unclipped" and "clipped", and "own" of this rank, where it is known."""
    resumed: Save | None = None
    """The save that was loaded before this step, or before a step since which no scheduler was seen."""
    resharded: Resharded | None = None
    """What was loaded in another layout than it was saved in, until the ranks have compared it."""
    history: AuditHistory = field(default_factory=AuditHistory)
    """What several relations learned from the audited steps before."""
    memory: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Relation → what it remembers of them."""
    assumed: bool = False
    """The position of the ranks on the parallel axes was not given; all are taken for data parallel."""
    own_loop: bool = False
    """The loop is the user's own, not a trainer's."""
    relation: str = ""
    """The relation that is checked."""

    def of(self, kind: type[T]) -> T:
        """Return the fact of a class that was established of this step; one with its defaults where nothing was seen."""
        return self.facts.of(kind)

    @property
    def model(self) -> ModelFacts:
        """The model as it is now."""
        return self.of(TrainingState).model

    @property
    def batches(self) -> tuple[int, ...]:
        """Fingerprint of what the model was called with, one for each micro-batch."""
        return self.of(TrainingCalls).batches

    @property
    def set_up(self) -> ModelFacts:
        """The model as it was set up."""
        return self.of(TrainingState).set_up

    @property
    def ordinal(self) -> int:
        """How many steps had begun with this one."""
        return self.of(TrainingState).ordinal

    def remembered(self, relation: str, otherwise: Any) -> Any:
        """Return what a relation returned from `remember` at the audited step before; `otherwise` at the first one."""
        return self.memory.get(relation, otherwise)

    @property
    def follows(self) -> bool:
        """Whether the audited step before is the very step before, and no optimizer stepped outside of both."""
        return self.passed == 1 and not self.of(UpdateCounts).between

    @property
    def passed(self) -> int:
        """How many steps passed since the audited step before; 0 where there was none."""
        if self.before is None:
            return 0
        return self.ordinal - self.before.ordinal or self.step - self.before.step

    def streak(self, kind: str, name: str) -> Streak | None:
        """Return the streak that a thing is in with this step; None where it is not known now."""
        now = streaks_now(self).get((kind, name))
        return None if now is None else _prolonged(self.history.streaks.get((kind, name)), now, self.ordinal)

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which there is more than one rank or chunk."""
        return frozenset(axis for axis, (_, size) in self.place.axes.items() if size > 1)

    @property
    def mastered(self) -> frozenset[str]:
        """Parameters whose optimizer steps a copy of another dtype, from which the training loop copies them."""
        held = {(shape, dtype) for shape, dtype in self.model.strays}
        shapes = {shape for shape, _ in held}
        return frozenset(
            p.name
            for p in self.model.parameters
            if p.trainable and p.owned is False and p.shape in shapes and (p.shape, p.dtype) not in held
        )

    def over(self, name: str, slot: str) -> frozenset[str]:
        """Return the axes over which a tensor of a parameter, or a buffer, is replicated: as an update left it at first
        (slot "buffer"), or as a forward first met it (slot "begun").
        """
        if slot in ("buffer", "begun"):
            return self.replicated.get(f"{slot} {name}", frozenset())
        declared = self.tensors.replicas.get((name, slot))
        return self.replicated.get(name, frozenset()) if declared is None else declared

    def found(
        self,
        message: str,
        about: str | Sequence[str] = "",
        slot: str = "value",
        *,
        next: str | None = None,
        measured: float | str | None = None,
        expected: float | str | None = None,
        floor: float | None = None,
        kind: str = "parameter",
        severity: str = "warning",
        names: Sequence[str] = (),
    ) -> Finding:
        """Make a finding of the relation that is checked. about: one name, or all names, of which the first is the place."""
        all_names = [about] if isinstance(about, str) and about else list(about)
        site = Site(kind, all_names[0], slot) if all_names else None  # pyright: ignore[reportArgumentType]
        told = (self.relation, severity, message, self.step, self.place, site, measured, expected, floor, next)
        return Finding(*told, names=tuple(names or all_names))  # pyright: ignore[reportArgumentType]


def without_gradient(
    evidence: Evidence, text: str, name: str, next: str, *, measured: str = "no gradient", expected: str = "a gradient"
) -> list[Finding]:
    """Return the warning that no gradient reaches a parameter by one of the ways on which the loss depends on it.

    Nothing where name is empty, or where the step made no update, whose gradients may serve something else.
    """
    if not name or not evidence.of(UpdateCounts).updates:
        return []
    return [evidence.found(text, name, "grad", next=next, measured=measured, expected=expected)]


def streaks_now(evidence: Evidence) -> dict[tuple[str, str], float | bool]:
    """Return what is followed from one audited step to the next, as it is at this one.

    Loss, gradient norm and whatever depends on the weights as reported, the rates in use, parameters that an update found
    without a gradient, and whether each buffer moved between the first forward and the update.
    """
    buffers = evidence.of(BufferStates)
    now: dict[tuple[str, str], float | bool] = {
        ("scalar", name): value
        for name, value in evidence.scalars.items()
        if role_of(name) in ("loss", "gradient norm") or name in evidence.of(DependentScalars).names
    }
    now |= {("rate", str(i)): rate for i, rate in enumerate(evidence.of(UsedGroups).rates)}
    now |= {("unreached", name): True for name in evidence.of(UsedGradients).unreached}
    return now | {
        ("moves", name): buffers.updated[name] != was for name, was in buffers.begun.items() if name in buffers.updated
    }


def streaks_with(evidence: Evidence) -> dict[tuple[str, str], Streak]:
    """Return all streaks with this step; without an update they stay what they were."""
    known, at = evidence.history.streaks, evidence.ordinal
    if not evidence.of(UpdateCounts).updates:
        return dict(known)
    return {key: _prolonged(known.get(key), value, at) for key, value in streaks_now(evidence).items()}


def _prolonged(known: Streak | None, value: float | bool, at: int) -> Streak:
    if known is None or known.value != value:
        return Streak(value, 1, at)
    return Streak(value, known.count + 1, known.since)


def along(evidence: Evidence, axes: frozenset[str]) -> list[Peer]:
    """Return the ranks that differ from this one in nothing but `axes`, this one included, in the order of ranks."""
    mine = evidence.place.axes
    return [
        peer
        for peer in evidence.peers
        if all(peer.axes.get(axis, 0) == index for axis, (index, _) in mine.items() if axis not in axes)
    ]


def group_words(evidence: Evidence, axes: frozenset[str], group: list[Peer]) -> str:
    """Name a group of ranks: "dp group of ranks 0, 1"."""
    over = "+".join(axis for axis in evidence.place.axes if axis in axes and evidence.place.axes[axis][1] > 1) or "world"
    ranks = [peer.rank for peer in group]
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"{over} group of ranks {listed}"


def differs_over_ranks(
    evidence: Evidence,
    number: str,
    name: str,
    floor: float,
    words: Callable[[str], str],
    *,
    digits: int,
    next: str = "",
) -> list[Finding]:
    """Find a number above 0 that is not equal on all ranks that report it, within `floor` of the largest.

    words: returns the message for the numbers as text, `2 on rank 0, 3 on rank 1`.
    """
    reported = {peer.rank: peer.numbers[number] for peer in evidence.peers if peer.numbers[number] > 0}
    high, low = max(reported.values(), default=0.0), min(reported.values(), default=0.0)
    if high == low or high - low <= floor * high:  # equal also where all are infinite
        return []
    listed = ", ".join(f"{value:.{digits}g} on rank {rank}" for rank, value in list(reported.items())[:4])
    numbers: dict[str, Any] = {"measured": reported.get(evidence.place.rank), "expected": "equal on all ranks", "floor": floor}
    return [evidence.found(words(listed), name, next=next or None, kind="scalar", severity="error", **numbers)]
