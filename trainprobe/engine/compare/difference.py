"""How two arrays differ, as sums that merge: parts of a tensor, in any order and on any machine, add up to the whole.

All sums are taken in float64. Elements that are not finite are counted apart and left out of the sums, so that one NaN does
not hide the rest; where one side is not finite and the other is something else, `max_abs` and `max_ulp` are infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

Position = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What one pass over two arrays a and b found.

    count: elements. changed: elements whose bits differ (whose values differ, when the two formats are not the same).
    nan_a, nan_b: NaNs on each side; misplaced: elements that are NaN or infinite on one side and something else on the other.
    square_d, square_a, square_b, dot: Σ(a−b)², Σa², Σb², Σab. max_abs: largest |a−b| and `at`, where it stands. max_ulp:
    largest |a−b| in units in the last place of the coarser format (|a−b| / ulp(max(|a|,|b|)), Goldberg 1991); for integers
    |a−b|.
    """

    count: int = 0
    changed: int = 0
    nan_a: int = 0
    nan_b: int = 0
    misplaced: int = 0
    square_d: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0
    dot: float = 0.0
    max_abs: float = 0.0
    max_ulp: float = 0.0
    at: Position | None = None

    def merge(self, other: Difference) -> Difference:
        """Return the difference of both parts together; `at` follows the larger `max_abs`, the first one on a tie."""
        ahead = self if self.at is not None and (other.at is None or self.max_abs >= other.max_abs) else other
        return Difference(
            self.count + other.count,
            self.changed + other.changed,
            self.nan_a + other.nan_a,
            self.nan_b + other.nan_b,
            self.misplaced + other.misplaced,
            self.square_d + other.square_d,
            self.square_a + other.square_a,
            self.square_b + other.square_b,
            self.dot + other.dot,
            max(self.max_abs, other.max_abs),
            max(self.max_ulp, other.max_ulp),
            ahead.at,
        )

    def moved(self, offset: Position) -> Difference:
        """Return the same difference, `at` counted from the start of a larger array in which this one begins at `offset`."""
        if self.at is None:
            return self
        place = tuple(o + i for o, i in zip(offset, self.at, strict=True))
        return replace(self, at=place)

    @property
    def l2(self) -> float:
        """‖a − b‖₂ over the elements that are finite on both sides."""
        return math.sqrt(self.square_d)

    @property
    def relative_l2(self) -> float:
        """‖a − b‖₂ / max(‖a‖₂, ‖b‖₂); 0 when both are zero."""
        scale = math.sqrt(max(self.square_a, self.square_b))
        return self.l2 / scale if scale else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between a and b; 1 when nothing differs or both are zero, None when exactly one is zero."""
        if not self.changed or not (self.square_a or self.square_b):
            return 1.0
        if not (self.square_a and self.square_b):
            return None
        return max(-1.0, min(1.0, self.dot / math.sqrt(self.square_a) / math.sqrt(self.square_b)))

    @property
    def changed_share(self) -> float:
        """Share of elements that changed, 0 to 1."""
        return self.changed / self.count if self.count else 0.0
