"""Is one checkpoint whole and consistent in itself? `trainprobe ckpt-show --check` reads every element of it once.

Looked for: values that are NaN or infinite, elements that no file holds, files that are missing or cannot be read, copies of
one tensor that disagree, and master weights that are not the weights once they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from trainprobe.ckpt_compare.coverage import HeldBox, coverage_of
from trainprobe.ckpt_compare.masters import agreement
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor
from trainprobe.ckpt_compare.tasks import TaskOutcome, chunks, release, run, tasks_of
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.measure import blocks
from trainprobe.engine.compare.number_formats import decode
from trainprobe.errors import FormatError

SOUND, WRONG, INCOMPLETE = 0, 2, 3


@dataclass(frozen=True, slots=True)
class CheckFault:
    """One thing that is wrong: the tensor or file, and what. missing: it could not be looked at, rather than being wrong."""

    where: str
    message: str
    missing: bool = False


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """What a check found. masters: parameters whose master weights were held against them."""

    faults: tuple[CheckFault, ...]
    tensors: int
    elements: int
    masters: int

    @property
    def code(self) -> int:
        """0 when nothing was found, 2 when values are wrong, 3 when something is missing or nothing was looked at."""
        if any(not f.missing for f in self.faults):
            return WRONG
        return INCOMPLETE if self.faults or not self.elements else SOUND

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        masters = f", {self.masters} of them held against their masters" if self.masters else ""
        looked = f"{self.tensors} tensors ({self.elements:,} elements){masters}"
        first = next(iter(self.faults), None)
        if first is None and not self.elements:
            return f"nothing was looked at: {looked}"
        if first is None:
            return f"sound: no NaN, nothing missing, no copies that disagree in {looked}"
        word = "wrong" if self.code == WRONG else "incomplete"
        more = f", and {len(self.faults) - 1} more faults" if len(self.faults) > 1 else ""
        return f"{word}: {first.where}: {first.message}{more}; looked at {looked}"


def check(checkpoint: Checkpoint, threads: int | None = None) -> CheckedCheckpoint:
    """Read every element of a checkpoint once, and its copies and master weights once more."""
    tensors = list(checkpoint.tensors.values())
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-check") as pool:
        found = [fault for faults in pool.map(_values, tensors) for fault in faults]
    found += _copies(tensors, threads)
    held = {t.name: t for t in tensors if not t.slot}
    masters = 0
    for tensor in tensors:
        weight = held.get(tensor.name) if tensor.slot == "master" else None
        if weight is not None:
            looked, fault = _master(weight, tensor)
            masters += looked
            found += fault
    found += [CheckFault(p.where, p.message, missing=True) for p in checkpoint.problems]
    elements = sum(t.count for t in tensors)
    return CheckedCheckpoint(tuple(sorted(found, key=lambda f: f.missing)), len(tensors), elements, masters)


def _values(tensor: LogicalTensor) -> list[CheckFault]:
    """Count what is not finite, and what nobody holds."""
    held = coverage_of(tensor)
    faults: list[CheckFault] = []
    if held.uncovered:
        gaps = ", ".join(map(str, held.gaps()))
        faults.append(
            CheckFault(tensor.key, f"no file holds {held.uncovered} of {tensor.count} elements: {gaps}", missing=True)
        )
    nan = infinite = 0
    where = ""
    for part in held.parts:
        try:
            for values in _decoded(part):
                nonfinite = ~np.isfinite(values)
                if nonfinite.any():
                    nans = int(np.isnan(values).sum())
                    nan, infinite, where = nan + nans, infinite + int(nonfinite.sum()) - nans, where or part.piece.where
        except FormatError as error:
            faults.append(CheckFault(tensor.key, str(error), missing=True))
        release(part.piece.source)
    if nan or infinite:
        faults.append(
            CheckFault(tensor.key, f"{nan:,} NaN and {infinite:,} infinite of {tensor.count:,} elements, first in {where}")
        )
    return faults


def _decoded(part: HeldBox) -> Iterator[np.ndarray]:
    """Yield the values of a part block by block; nothing for integers, which are always finite."""
    fmt = part.piece.source.format
    for box in chunks(part.box, part.piece.source):
        bits = part.load(box)
        if fmt.mantissa is None:
            return
        yield from (decode(np.ascontiguousarray(bits[where]), fmt) for where in blocks(bits.shape))


def _copies(tensors: Sequence[LogicalTensor], threads: int | None) -> list[CheckFault]:
    """Compare the copies of a tensor that several ranks hold."""
    pairs = [(t, copy) for t in tensors for copy in coverage_of(t).copies]
    outcomes = run([task for i, (_, copy) in enumerate(pairs) for task in tasks_of(i, copy)], threads)
    merged: dict[int, Difference] = {}
    for outcome in outcomes:
        merged[outcome.row] = merged.get(outcome.row, Difference()).merge(outcome.difference)
    told: list[CheckFault] = []
    for row, d in merged.items():
        tensor, copy = pairs[row]
        if d.changed:
            which = f"{copy.a.piece.where} and {copy.b.piece.where}"
            told.append(CheckFault(tensor.key, f"copies disagree in {d.changed:,} of {d.count:,} elements ({which})"))
    return [*told, *_unread(outcomes, [t.key for t, _ in pairs])]


def _unread(outcomes: Sequence[TaskOutcome], keys: Sequence[str]) -> list[CheckFault]:
    failures = dict.fromkeys((keys[o.row], o.failure) for o in outcomes if o.failure)
    return [CheckFault(key, failure, missing=True) for key, failure in failures]


def _master(weight: LogicalTensor, master: LogicalTensor) -> tuple[bool, list[CheckFault]]:
    """Tell whether a master could be held against its weight, and what is wrong with it."""
    try:
        seen = agreement(weight, master, most=None)
    except FormatError as error:
        return False, [CheckFault(master.key, str(error), missing=True)]
    if seen is None or seen.equal == seen.count:
        return seen is not None, []
    unequal = seen.count - seen.equal
    text = f"rounded to {weight.format.name}, {unequal:,} of {seen.count:,} master weights are not the weight"
    return True, [CheckFault(master.key, text)]


def summary(checked: CheckedCheckpoint) -> Mapping[str, object]:
    """Return a check as plain values, for JSON."""
    faults = [{"where": f.where, "message": f.message, "missing": f.missing} for f in checked.faults]
    return {"verdict": checked.sentence.partition(":")[0], "exit_code": checked.code, "faults": faults}
