"""Quantised weights seen as the values that they stand for: codes, scales and zero points are one tensor.

A value is (level − zero) × scale. The layouts of the writers are in `quantised_layouts`; here is what they have in common. Rows
are decoded when they are asked for. Where two sides are not the same within the rounding of their floats, a code still agrees
with whatever rounds to it: a value within half the gap to its neighbours. A factor is no rounding, and neither are a few values
that alone are apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.coverage import HeldBox
from trainprobe.ckpt_compare.pieces import Array, LogicalTensor, Reshaped, Source, Turned, Window, bottom
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.number_formats import NumberFormat, decode, number_format
from trainprobe.engine.geometry.rectangles import Point, Rectangle
from trainprobe.errors import FormatError

View = Literal["values", "units", "scales", "zeros", "halves"]
F32 = npt.NDArray[np.float32]
FLOAT32 = number_format("float32")
UNDECODED = "quantised"  # how what is said of codes begins that are not decoded
SLACK = 0.02  # of half a gap: scales were rounded as well when the codes were chosen
MISFITS = (ValueError, IndexError, KeyError, TypeError, OverflowError, ZeroDivisionError, RecursionError)
LEAST = 0.12  # gaps: what is rounded lies anywhere between two levels, which is 0.29 of a gap
SEGMENT = 32  # neighbours that share a scale in nearly all layouts


@dataclass(frozen=True, slots=True)
class Coded:
    """Some rows of a quantised weight, arrays that broadcast to them. halves: half the gap to the next level, in levels."""

    levels: Array
    scales: Array | float = 1.0
    zeros: Array | float = 0.0
    halves: Array | float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A source of decoded values. scheme: in words. parts: what is stored, by role. lacks: the scales that no
    file holds."""

    scheme: str
    shape: Point
    parts: Mapping[str, Source]
    options: Mapping[str, Any]
    lacks: str = ""
    scales_name: str = ""
    view: View = "values"

    @property
    def format(self) -> NumberFormat:
        """What the decoded values are."""
        return FLOAT32

    def rows(self, start: int, stop: int) -> Coded:
        """Return the rows start … stop−1 as they are stored."""
        raise NotImplementedError

    def load(self) -> Array:
        """Decode everything."""
        return self.part(tuple(slice(0, n) for n in self.shape))

    def part(self, cut: tuple[slice, ...]) -> Array:
        """Decode a part."""
        try:
            coded = self.rows(cut[0].start, cut[0].stop)
        except MISFITS as error:
            raise FormatError(f"the parts of a weight in {self.scheme} do not fit each other: {error}") from error
        shape = (cut[0].stop - cut[0].start, *self.shape[1:])
        found: Any = {
            "values": lambda: (coded.levels - coded.zeros) * coded.scales,
            "units": lambda: coded.levels - coded.zeros,
            "scales": lambda: coded.scales,
            "zeros": lambda: coded.zeros,
            "halves": lambda: np.multiply(coded.halves, np.abs(coded.scales)),
        }[self.view]()
        return np.broadcast_to(np.asarray(found, np.float32), shape)[(slice(None), *cut[1:])]

    def held(self, role: str, *cut: slice) -> Array:
        """Return the decoded numbers of one part, or of some of its rows."""
        source = self.parts[role]
        return decode(np.ascontiguousarray(source.load()[cut]), source.format)


@dataclass(frozen=True, slots=True)
class Undecoded:
    """Codes in a format that is not decoded here."""

    scheme: str
    shape: Point
    format: NumberFormat

    def load(self) -> Array:
        """Raise FormatError."""
        raise FormatError(not_compared(self.scheme))


def not_compared(scheme: str) -> str:
    """Return what is said of codes that are not decoded."""
    return f"{UNDECODED} ({scheme}), not compared"


def scheme_of(tensor: LogicalTensor | None) -> str:
    """Return in which scheme a tensor is quantised; nothing for plain numbers."""
    source = bottom(tensor.pieces[0].source) if tensor is not None and tensor.stored else None
    return source.scheme if isinstance(source, (Quantised, Undecoded)) else ""


def _over(source: Source, view: View) -> Source:
    if isinstance(source, (Window, Reshaped, Turned)):
        return replace(source, source=_over(source.source, view))
    return replace(source, view=view) if isinstance(source, Quantised) else source


def seen_as(tensor: LogicalTensor, view: View) -> LogicalTensor:
    """Return a quantised tensor with its units, scales or zeros in the place of its values."""
    return replace(tensor, held=tuple(replace(p, source=_over(p.source, view)) for p in tensor.pieces))


def within_codes(a: HeldBox, b: HeldBox, box: Rectangle, found: Difference, x: Array, y: Array) -> Difference:
    """Return a difference in units of the codes' gaps where every element is at most half of one apart.

    x, y: the values. Nothing is changed between two of one scheme, and where a side is a multiple of the other.
    """
    sides = [part for part in (a, b) if isinstance(bottom(part.piece.source), Quantised)]
    schemes = {bottom(part.piece.source).scheme for part in sides}  # pyright: ignore[reportAttributeAccessIssue]
    if not sides or len(sides) > len(schemes) or found.misplaced:
        return found
    values = [decode(bits, part.piece.source.format).astype(np.float64) for bits, part in ((x, a), (y, b))]
    halves = sum(
        replace(part, piece=replace(part.piece, source=_over(part.piece.source, "halves"))).load(box).astype(np.float64)
        for part in sides
    )
    rough = max(2.0**-12, *(part.piece.source.format.epsilon for part in (a, b)))
    apart, near = np.abs(values[0] - values[1]), rough / 2 * np.maximum(np.abs(values[0]), np.abs(values[1]))
    exact = np.count_nonzero(apart <= near) / apart.size
    if np.any(apart > (1 + SLACK) * halves + near) or exact > 0.97 or _multiple(values[0], values[1], rough):
        return found
    share = apart / np.maximum(2 * halves, np.finfo(float).tiny)
    beside_zero = share[np.abs(values[0]) > halves]
    if beside_zero.size >= 256 and np.sqrt(np.mean(beside_zero**2)) < LEAST:
        return found
    return replace(found, max_ulp=min(1.0, float(share.max())))


def _multiple(x: Array, y: Array, rough: float) -> bool:
    """Whether some neighbours are those of the other side times a factor, but for the rounding of floats."""
    columns = x.shape[-1] if x.ndim else 1
    width = SEGMENT if columns % SEGMENT == 0 else columns
    x, y = x.reshape(-1, width), y.reshape(-1, width)
    xx, xy, yy = (x * x).sum(1), (x * y).sum(1), (y * y).sum(1)
    some = (np.count_nonzero(x, axis=1) >= 4) & (xx > 0)
    factor = xy[some] / xx[some]
    left = yy[some] - factor * xy[some]
    return bool(np.any((left <= rough * rough / 12 * yy[some]) & (np.abs(factor - 1) > rough / 2)))
