"""A value of the whole model, made of what several ranks hold of it; its numbers are worked out when they are asked for.

Statistics of parts that do not overlap add up: extremes are the extremes of extremes, sums and sums of squares add. Of terms
of one sum (a gradient before it is reduced) only the mean follows from statistics; all of it where values are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from trainprobe.dump_compare.dump_side import Columns, Side, gathered, norm_of
from trainprobe.dump_compare.intervals import Interval, interval
from trainprobe.dump_compare.layouts.rank_boxes import Box, extent, holder, put_together, share_of
from trainprobe.dump_compare.renamed.fused_rows import Laid
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import StoredStepData
from trainprobe.engine.stats.checksum import MASK

How = Literal["parts", "terms"]


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank holds of a value.

    data: its samples (see grouping). weight: what its numbers are multiplied by. box: its place in the whole where the dump
    says it, which tells copies from parts.
    """

    side: Side
    value: Value
    rank: int
    data: tuple[int, ...] = ()
    tensor: int = 0
    weight: float = 1.0
    box: Box | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what this rank holds; a DTensor has that of the whole."""
        return tuple(self.value.shape) if self.box is None else self.box.shape

    @property
    def size(self) -> int:
        """Return the number of elements that this rank holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Join:
    """How parts make a value. how: "parts" lie side by side, "terms" are added. replicas: (first, another copy of it), each.

    mean: the value is the mean of the terms and not their sum. boxes: where in the whole each part lies, where that is known.
    terms: how many terms there are of each element; sums of several samples may lie side by side. several: of modules that are
    one on the other side, how each makes its own value, where the shape of each is known. laid: how these lie in the one.
    """

    parts: Sequence[RankPart]
    how: How = "parts"
    shape: tuple[int, ...] = ()
    replicas: Sequence[tuple[RankPart, RankPart]] = ()
    mean: bool = False
    boxes: Sequence[Box] = ()
    terms: int = 1
    several: Sequence[Join] = ()
    laid: Laid | None = None

    @property
    def form(self) -> tuple[int, ...] | None:
        """Return the shape that parts side by side make, None where it is not known."""
        if self.how != "parts":
            return None
        return self.parts[0].shape if len(self.parts) == 1 else extent(self.boxes)

    @property
    def factor(self) -> float:
        """Return what each part's numbers are multiplied by beside its own weight."""
        return 1 / len(self.parts) if self.mean else 1.0

    @property
    def size(self) -> int:
        """Return the number of elements of the whole."""
        return sum(part.size for part in self.parts) // self.terms


@dataclass(slots=True)
class _Row:
    join: Join
    interval: Interval | None = None
    compared: bool = False


@dataclass(slots=True)
class JoinedSide(Side):
    """All ranks of one step, asked as if one rank had held the whole model.

    Values are those that `add` returned; nothing of a tensor is kept, and no two tensors are in memory at once.
    """

    has_copies: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True
    calls: list[Call] = field(default_factory=list[Call])
    _rows: list[_Row] = field(default_factory=list[_Row])

    def __init__(self, name: str, ranks: Sequence[Side]) -> None:
        self.name = name
        self.ranks = ranks
        self.folder = ranks[0].folder.parent
        first = ranks[0].step_data
        self.calls = []
        self._rows = []
        self.step_data: StoredStepData = StoredStepData(
            first.step, first.place, first.framework, first.level, first.task, self.calls, [], first.partials
        )
        self.unread: list[str] = []

    def add(self, join: Join) -> Value:
        """Return the value that a join makes."""
        first = join.parts[0].value
        self._rows.append(_Row(join))
        return Value(len(self._rows) - 1, first.dtype, join.shape, type=first.type, tensor=first.tensor)

    def numbers(self, value: Value) -> Mapping[str, float]:
        """Return the statistics that follow from those of the parts."""
        join = self._rows[value.row].join
        statistics = [part.side.numbers(part.value) for part in join.parts if part.size]
        weights = [part.weight * join.factor for part in join.parts if part.size]
        names = [name for name in ("max", "min", "mean", "norm") if statistics and all(name in each for each in statistics)]
        sizes = [part.size for part in join.parts if part.size]
        if join.how == "terms" and len(statistics) > 1:
            sums = (
                [w * each["mean"] * n for w, each, n in zip(weights, statistics, sizes, strict=True)] if "mean" in names else []
            )
            return {"mean": math.fsum(sums) / math.prod(join.shape)} if sums else {}
        scaled = {name: [w * each[name] for w, each in zip(weights, statistics, strict=True)] for name in names}
        return {name: together(name, numbers, sizes) for name, numbers in scaled.items()}

    def columns(self, values: Sequence[Value]) -> Columns:
        """Return the statistics and fingerprints of these values."""
        return gathered(self, values)

    def norm(self, value: Value) -> float:
        """Return the l2 norm of a value, NaN where the dumps have neither statistics nor elements that it follows from."""
        numbers = self.numbers(value)
        return numbers["norm"] if "norm" in numbers else norm_of(self.array(value))

    def bits(self, value: Value) -> Mapping[str, int]:
        """Return the fingerprints of the only part, or that of the whole which shares of parts add up to; else none.

        The shares are known where a dump says which part of which tensor each rank holds, of all that the tensor has.
        """
        join = self._rows[value.row].join
        if any(part.weight * join.factor != 1 for part in join.parts):
            return {}
        if len(join.parts) == 1:
            return join.parts[0].side.bits(join.parts[0].value)
        held = [part for part in join.parts if part.size]
        shares = [share_of(part.value, part.side.bits(part.value), part.box) for part in held]
        wholes = {share[0] for share in shares if share is not None}
        formats = {part.value.dtype for part in held}
        complete = join.how == "parts" and len(wholes) == 1 and sum(part.size for part in held) == wholes.pop()
        if not complete or None in shares or len(formats) > 1:
            return {}
        return {"checksum": sum(share[1] for share in shares if share is not None) & MASK}

    def array(self, value: Value) -> npt.NDArray[Any] | None:
        """Return the elements where they are stored and it is known where in the whole each part lies.

        Where that is not known, statistics tell how far two values are apart. The parts are read one after the other, and none
        is kept.
        """
        return array_of(self._rows[value.row].join)

    def place_of(self, value: Value, at: Sequence[int]) -> str:
        """Return which element of which of several modules an element of theirs is, or which rank holds it of a whole."""
        join = self._rows[value.row].join
        if join.laid is not None:
            return join.laid.place(at)
        shape = extent(join.boxes) if len(join.parts) > 1 and len(join.boxes) == len(join.parts) else None
        if shape is None or math.prod(shape) != math.prod(join.shape):
            return ""
        where = [int(i) for i in np.unravel_index(int(np.ravel_multi_index([*at], join.shape)), shape)]
        part = holder(join.boxes, where)
        return "" if part is None else f"most at {where} in {self.name}, which rank {join.parts[part].rank} holds"

    def disagreement(self, value: Value) -> Interval | None:
        """Return how far the replica that is furthest from the first is apart from it, None where all agree."""
        row = self._rows[value.row]
        if not row.compared:
            row.compared = True
            row.interval = _disagreement(self.name, row.join.replicas)
        return row.interval

    def shapes(self, value: Value) -> list[tuple[int, ...]]:
        """Return the shapes of what ranks hold of a value."""
        return [part.shape for part in self._rows[value.row].join.parts]


def array_of(join: Join) -> npt.NDArray[Any] | None:
    """Return the elements of what a join makes (see JoinedSide.array)."""
    if join.several:
        if join.laid is None:
            return None
        arrays = [array for each in join.several if (array := array_of(each)) is not None]
        whole = join.laid.together(arrays) if len(arrays) == len(join.several) else None
    else:
        read = (_scaled(part, join.factor) for part in join.parts)
        if join.how == "terms":
            whole = _added(read, join.shape)
        else:
            whole = put_together(read, join.boxes) if len(join.parts) > 1 else next(read)
    return None if whole is None or whole.size != math.prod(join.shape) else whole.reshape(join.shape)


def _scaled(part: RankPart, factor: float) -> npt.NDArray[Any] | None:
    array, weight = part.side.held(part.value, part.shape), part.weight * factor
    return array if array is None or weight == 1 else np.asarray(array, np.float64) * weight


def _added(terms: Iterator[npt.NDArray[Any] | None], shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
    """Return the sum of terms, of which one after the other is read; None where one is missing or of another shape."""
    total = next(terms)
    for i, term in enumerate(terms):
        if total is None or term is None or term.shape != shape:
            return None
        total = np.asarray(np.add(total, term, dtype=np.float64)) if i == 0 else np.add(total, term, out=total)
    return None if total is None or total.shape != shape else total


def _disagreement(name: str, replicas: Sequence[tuple[RankPart, RankPart]]) -> Interval | None:
    found = [(interval(one.side, one.value, other.side, other.value), one, other) for one, other in replicas]
    found = [each for each in found if each[0].low > 0]
    if not found:
        return None
    far, one, other = max(found, key=lambda each: each[0].low)
    note = f"in {name}, rank {other.rank} holds another copy than rank {one.rank}"
    return Interval(far.low, far.high, "replicas", note)


def agree(parts: Sequence[RankPart]) -> bool:
    """Return whether parts hold the same numbers, as far as the dump says."""
    return all(interval(a.side, a.value, b.side, b.value).low == 0 for a, b in pairwise(parts))


def together(name: str, numbers: Sequence[float], sizes: Sequence[int]) -> float:
    """Return a statistic of a whole from those of parts that lie side by side, with these numbers of elements."""
    if any(math.isnan(number) for number in numbers):
        return math.nan
    if name in ("max", "min"):
        return max(numbers) if name == "max" else min(numbers)
    if name == "norm":
        return math.hypot(*numbers)
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)
    return math.fsum(number * size for number, size in zip(numbers, sizes, strict=True)) / sum(sizes)
