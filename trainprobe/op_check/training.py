"""Operators judged while a training runs: the values of one step are held on the host and judged as the step ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.step_data import AFTER, leaves
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.storage.dumps.tensor_files import SavedTensor
from trainprobe.engine.storage.dumps.tensor_store import array_of
from trainprobe.errors import FormatError, StopTraining, did_you_mean
from trainprobe.op_check.conclusion import beyond, described, outcomes
from trainprobe.op_check.condition import condition_rank, sentences
from trainprobe.op_check.condition import write as write_conditions
from trainprobe.op_check.dump import DumpChecked, Row, check_rank, names_of
from trainprobe.op_check.judge import OUTCOMES, Tolerance
from trainprobe.op_check.measure import NEAR
from trainprobe.op_check.plan import Kind, OpCheckPlan
from trainprobe.op_check.recorded import RecordedRank, Unit
from trainprobe.op_check.replay import write_replay

RULE = "op_check"
_STOP = "`op_check: {stop: true}` in the plan stops here and writes the call with a script that runs it anywhere"
# what torch dispatches to → what a program calls
_CALLED = {
    **dict.fromkeys(["addmm", "mm", "bmm", "mv"], ("linear", "matmul")),
    **dict.fromkeys(["convolution", "_convolution", "convolution_overrideable"], ("conv1d", "conv2d", "conv3d")),
    "native_layer_norm": ("layer_norm",),
    "native_group_norm": ("group_norm",),
    "native_batch_norm": ("batch_norm",),
    "native_dropout": ("dropout",),
    "_softmax": ("softmax",),
    "_log_softmax": ("log_softmax", "cross_entropy"),
    "nll_loss_forward": ("nll_loss", "cross_entropy"),
    "_fused_rms_norm": ("rms_norm",),
}
_ATTENTION = "_scaled_dot_product_"


class HeldValues:
    """The values of the step that is collected: a sink of the writer, and what the judge reads. most: bytes, of one step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._bytes = 0
        self._values: dict[str, SavedTensor] = {}
        self._of_length: dict[int, list[memoryview]] = defaultdict(list)  # the latest last

    def tensor(self, step: int, saved: SavedTensor) -> bool:
        """Hold a value while there is room; an argument after a call that has the bits of another value takes none."""
        data = memoryview(saved.data)
        before = self._of_length[data.nbytes]
        equal = next((one for one in reversed(before) if one == data), None) if f".{AFTER}." in saved.key else None
        if equal is not None:
            self._values[saved.key] = SavedTensor(saved.key, saved.dtype, saved.shape, equal)
        elif self._bytes + saved.nbytes <= self.most:
            self._values[saved.key] = saved
            self._bytes += saved.nbytes
            before.append(data)
        return True

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a value. Raises FormatError for one that there was no room for."""
        if name not in self._values:
            raise FormatError(f"the values of the step take more than {self.most} bytes: raise op_check.max_bytes")
        return array_of(self._values[name])

    def alike(self, one: str | None, other: str | None) -> bool:
        """Return whether two values of the step are known to have the same bits."""
        a, b = (self._values.get(name or "") for name in (one, other))
        return a is not None and b is not None and memoryview(a.data) == memoryview(b.data)

    def saved(self, name: str) -> SavedTensor | None:
        """Return a value as it was stored, None for one that there was no room for."""
        return self._values.get(name)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._bytes

    def hand_over(self) -> HeldValues:
        """Return an object of its own with all values, and hold none any more."""
        taken = HeldValues(self.most)
        taken._values, taken._bytes = dict(self._values), self._bytes
        self.drop()
        return taken

    def drop(self) -> None:
        """Forget all values."""
        self._values.clear()
        self._of_length.clear()
        self._bytes = 0

    def write(self, step_data: StepData) -> None:
        """Do nothing: the step is judged before it is written."""

    def close(self) -> None:
        """Do nothing."""


class OpNames:
    """Operators by the names that users write: `layer_norm`, `Functional.*`, `torch.ops.aten.addmm` or `addmm.default`."""

    def __init__(self, written: Sequence[str]) -> None:
        self._patterns = {name: _patterns(name) for name in written}
        self._idle = set(written)
        self._known: set[str] = set()

    def has(self, names: Sequence[str]) -> bool:
        """Return whether an operator is meant. names: all that it can be called, with and without its prefix last."""
        self._known.update(names[-2:])
        hits = [w for w, patterns in self._patterns.items() if any(fnmatchcase(n, p) for n in names for p in patterns)]
        self._idle.difference_update(hits)
        return bool(hits)

    def unmatched(self) -> list[str]:
        """Return a sentence's part for each name that no operator had."""
        return [f"{name!r}{did_you_mean(name, sorted(self._known))}" for name in self._patterns if name in self._idle]


def _patterns(name: str) -> tuple[str, ...]:
    bare = name.removeprefix("torch.ops.").removeprefix("aten.").removeprefix("aten::").removesuffix(".default")
    called = ("scaled_dot_product_attention",) if bare.startswith(_ATTENTION) else _CALLED.get(bare, ())
    return (name, bare, bare.rstrip("_") or bare, *called)


class Chosen:
    """The operator calls that a plan wants judged."""

    def __init__(self, plan: OpCheckPlan) -> None:
        self._modules = Names(plan.modules)
        self._any = not plan.ops
        self._ops, self._skip = OpNames(plan.ops), OpNames(plan.skip)

    def __contains__(self, unit: Unit) -> bool:
        names = names_of(unit)
        chosen = self._any or self._ops.has(names)
        return chosen and not self._skip.has(names) and (unit.module or "") in self._modules

    def unmatched(self) -> list[str]:
        """Return a sentence's part for each name that no operator had."""
        return [*self._ops.unmatched(), *self._skip.unmatched()]


class Verdicts:
    """What a run has judged: writes a line for each call, makes findings and counts. say: writes one line.

    advice: what to do about a wrong operator, for its finding.
    """

    def __init__(self, say: Callable[[str], None], advice: str = _STOP) -> None:
        self._say = say
        self._advice = advice
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self.steps = 0
        self.verbose = False

    def add(self, rows: Sequence[Row], step: int, place: Place) -> list[Finding]:
        """Write and count the calls of one step; return a finding for each operator and direction that is wrong in it."""
        self.steps += 1
        for row in rows:
            self._reasons[row.worst.reason] += (1 + row.equal) * (row.worst.outcome == "not checked")
            self._say(line(row, self.verbose))
        self._counts += outcomes(rows)
        return list(_findings(rows, step, place, self._advice))

    def summary(self, unmatched: Sequence[str] = ()) -> str:
        """Return what was judged in all, as a sentence without its full stop. unmatched: names that no operator had."""
        counts = ", ".join(f"{self._counts[outcome]} {outcome}" for outcome in OUTCOMES if self._counts[outcome])
        text = f"op_check: {self.steps} {'step' if self.steps == 1 else 'steps'} judged, {sum(self._counts.values())} calls"
        text += f" ({counts})" if counts else ""
        why, count = next(iter((+self._reasons).most_common(1)), ("", 0))
        text += f"; not checked for the most part because {why}" if count else ""
        return text + (f"; no operator is called {', '.join(unmatched)}" if unmatched and self.steps else "")


class StepJudge:
    """Judges the operators of each step that was collected, writes a line for each and returns findings.

    values: those of the step. say: writes one line. folder: where replays are written. Raises StopTraining at a bug where the
    plan says so.
    """

    def __init__(self, plan: OpCheckPlan, values: HeldValues, say: Callable[[str], None], folder: Path) -> None:
        self._stop = plan.stop
        self._condition: Kind | None = plan.condition
        self._say = say
        self._values = values
        self._folder = folder
        self._chosen = Chosen(plan)
        self._tolerance = tolerance(plan)
        self.verdicts = Verdicts(say)

    def __call__(self, step_data: StepData) -> list[Finding]:
        """Judge one step."""
        recorded = RecordedRank(step_data, self._values)
        recorded.recognise(self._values.alike)
        found = DumpChecked()
        units = [unit for unit in recorded.units() if unit in self._chosen]
        check_rank(recorded, units, found, (step_data.step, step_data.place.rank), tolerance=self._tolerance)
        findings = self.verdicts.add(found.rows, step_data.step, step_data.place)
        if self._condition is not None:
            findings += self._conditions(self._condition, recorded, units, step_data)
        worst = max((row for row in found.rows if row.worst.outcome == "bug"), key=lambda row: row.worst.worst, default=None)
        if worst is not None and self._stop:
            script = write_replay(worst, self._folder, recorded)
            raise StopTraining(f"op_check: {described(worst)}; the call was written: python {script}")
        return findings

    def _conditions(self, kind: Kind, recorded: RecordedRank, units: Sequence[Unit], step_data: StepData) -> Iterable[Finding]:
        """Run the step's calls again with perturbed inputs; return a finding for each operator that is not deterministic."""
        at = step_data.step, step_data.place.rank
        found = condition_rank(recorded, units, kind, at, None)
        write_conditions(found, kind, self._folder / f"condition_step{at[0]}_rank{at[1]}.json")
        for text in sentences(found, kind, len(found)):
            self._say(f"step {at[0]} {text.strip()}")
        others = [one for one in found if kind == "nothing" and not one.reason and one.worst > 0]
        for one in others:
            text = f"{one.entry}{f' in {one.module}' if one.module else ''} is not deterministic: "
            text += f"run again with the same inputs on {one.device} it gave other bits, {one.worst:.1e} away"
            after = "torch.use_deterministic_algorithms(True) names the operators that have no deterministic kernel"
            yield Finding(RULE, "warning", text, step=at[0], place=step_data.place, next=after)

    def summary(self) -> str:
        """Return what was judged in all, as a sentence."""
        return f"{self.verdicts.summary(self._chosen.unmatched())}."


def tolerance(plan: OpCheckPlan) -> Tolerance | None:
    """Return the tolerance that a plan sets in place of the calibrated bound."""
    return None if plan.atol is None or plan.rtol is None else Tolerance(plan.atol, plan.rtol)


def line(row: Row, verbose: bool = False) -> str:
    """Return the line of one call in the log: where, which operator, and [ERROR], [WARNING] or that it succeeds."""
    worst = row.worst
    name = row.entry.replace(f".{row.checked.direction}", "")
    head = f"step {row.step} {row.module or '-'} {name} ({row.checked.direction})"
    equal = f" (and {row.equal} equal calls)" if row.equal else ""
    if verbose and row.unit is not None:
        equal += f"\n    inputs {_shapes([row.unit.call.args, row.unit.call.kwargs])}; outputs {_shapes(row.unit.call.out)}"
    if worst.outcome == "bug":
        furthest = [f"Element at index {at} is not close: {got:.9g} vs {want:.9g}" for at, got, want in worst.furthest]
        return "\n    ".join([f"[ERROR] {head} fails: {described(row)}{equal}", *furthest])
    if worst.outcome == "not checked":
        return f"[WARNING] {head} has not been tested: {worst.reason}{equal}"
    if worst.outcome == "suspicious":
        return f"[WARNING] {head}: {described(row)}{equal}"
    distance = f", {beyond(worst.worst)} of its own rounding (limit {NEAR:g})" if worst.worst else ""
    return f"{head} succeeds: {worst.outcome}{distance}{f', {worst.reason}' if worst.reason else ''}{equal}"


def _shapes(tree: Any) -> str:
    return ", ".join(f"{v.dtype.removeprefix('torch.')}{[*v.shape]} on {v.device}" for _, v in leaves(tree, "")) or "none"


def _findings(rows: Iterable[Row], step: int, place: Place, advice: str) -> Iterable[Finding]:
    """Yield a finding for each operator and direction that is wrong in this step, with its worst call."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.worst.outcome in ("bug", "suspicious"):
            groups[row.worst.outcome, row.name, row.checked.direction].append(row)
        if row.same_inputs:
            text = f"{row.entry} had the inputs of {row.same_inputs} and gave another result: it is not deterministic"
            yield Finding(RULE, "warning", text, step=step, place=place)
    for (outcome, _, _), group in groups.items():
        worst = max(group, key=lambda row: row.worst.worst)
        more = f"; so are {len(group) - 1} more of its calls" if len(group) > 1 else ""
        yield Finding(
            RULE,
            "error" if outcome == "bug" else "warning",
            f"{described(worst)}{more}",
            step=step,
            place=place,
            next=advice,
        )
