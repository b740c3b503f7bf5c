"""What a comparison found: a row for each tensor, what is wrong inside one checkpoint, and all of it together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainprobe.ckpt_compare.cause import Cause
from trainprobe.ckpt_compare.pairing import Move
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, What
from trainprobe.ckpt_compare.quantised import scheme_of
from trainprobe.ckpt_compare.state import StateRow
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.rounding import noise_floor

RowVerdict = Literal["identical", "rounding", "differ", "only in A", "only in B", "shape", "incomplete"]
INCOMPLETE: tuple[RowVerdict, ...] = ("only in A", "only in B", "shape", "incomplete")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """What was found out about one logical tensor. a, b: the tensor on each side, None where a side has none."""

    key: str
    verdict: RowVerdict
    a: LogicalTensor | None
    b: LogicalTensor | None
    difference: Difference = field(default_factory=Difference)
    note: str = ""
    located: str = ""
    reason: str = ""  # what a row that is not whole is, behind its number: `with 32 rows more in B`

    @property
    def what(self) -> What:
        """Whether this belongs to the weights or to the optimizer."""
        return _held(self).what

    @property
    def floor(self) -> float:
        """Relative l2 difference that the rounding of the two number formats explains; 0 where one of them is not known."""
        return noise_floor(self.a.format, self.b.format) if self.a and self.b and self.a.stored and self.b.stored else 0.0

    @property
    def shape_a(self) -> tuple[int, ...] | None:
        """Shape in A; None where A does not have the tensor."""
        return self.a.shape if self.a is not None else None

    @property
    def shape_b(self) -> tuple[int, ...] | None:
        """Shape in B; None where B does not have the tensor."""
        return self.b.shape if self.b is not None else None

    @property
    def dtype_a(self) -> str:
        """Number format in A, empty where no file of A holds any of it."""
        return _dtype(self.a)

    @property
    def dtype_b(self) -> str:
        """Number format in B, empty where no file of B holds any of it."""
        return _dtype(self.b)

    @property
    def native_a(self) -> str:
        """Name in the files of A."""
        return (self.a.native or self.a.name) if self.a is not None else ""

    @property
    def native_b(self) -> str:
        """Name in the files of B."""
        return (self.b.native or self.b.name) if self.b is not None else ""

    @property
    def where(self) -> str:
        """File and name of the largest difference; of a tensor that was not measured, of its first part."""
        if self.located or self.verdict not in ("shape", "only in A", "only in B"):
            return self.located
        pieces = _held(self).pieces
        return pieces[0].where if pieces else ""


def _dtype(tensor: LogicalTensor | None) -> str:
    """Return the number format of a tensor, or how it is quantised."""
    return scheme_of(tensor) or (tensor.format.name if tensor is not None and tensor.stored else "")


def _held(row: TensorRow) -> LogicalTensor:
    held = row.a if row.a is not None else row.b
    assert held is not None
    return held


@dataclass(frozen=True, slots=True)
class CheckpointFault:
    """Something wrong inside one checkpoint, or missing from the comparison: which side ("A", "B"), where, and what."""

    side: str
    where: str
    message: str
    severe: bool = True  # False: copies of one tensor disagree, yet everything could be compared


@dataclass(frozen=True, slots=True)
class CheckpointComparison:
    """All that was found. `compared`: which kinds of content both sides hold and that were looked at.

    `one_sided`: kinds other than tensors that only one side holds. `renamed`: tensors with equal content under names that
    only one side has; they are rows, too.
    """

    a: Checkpoint
    b: Checkpoint
    rows: tuple[TensorRow, ...]
    faults: tuple[CheckpointFault, ...]
    state: tuple[StateRow, ...]
    moves: tuple[Move, ...]
    compared: tuple[What, ...]
    counted: tuple[What, ...]
    notes: tuple[str, ...] = ()
    one_sided: tuple[str, ...] = ()
    renamed: tuple[Move, ...] = ()
    causes: tuple[Cause, ...] = ()
