"""Tokens that two engines scored, one after the other, and the noise that their numbers have anyway."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

ROUNDING = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8": 2.0**-4,
}
SUMS = {"float64": 8.0, "float32": 8.0}  # more than its own rounding: what sums of products add, as they are kept in the format
ALLOWED = 3.0  # times the typical gap: what the mean gap of two sound engines may be
FAR = 10.0  # times that: a token that is told by itself
CATASTROPHIC = 1.0  # nats


@dataclass(frozen=True)
class ScoredTokens:
    """All places of all sequences, padding included: arrays of one value a place, [n], unless a field says otherwise."""

    trainer: F64
    """Log-probability in nats, of the trainer."""
    engine: F64
    """The same, of the engine that sampled."""
    row: npt.NDArray[np.int32]
    """The sequence of each place."""
    starts: npt.NDArray[np.int64]
    """Where each sequence begins, and the end of the last: [sequences + 1]."""
    mask: Mask
    """Where the loss counts a token."""
    tokens: npt.NDArray[Any] | None = None
    trainer_tokens: npt.NDArray[Any] | None = None
    repeated: npt.NDArray[Any] | None = None
    """The trainer's second scoring of the same tokens."""
    precise: npt.NDArray[Any] | None = None
    """A scoring in higher precision."""
    entropy: npt.NDArray[Any] | None = None
    position: npt.NDArray[Any] | None = None
    version: npt.NDArray[Any] | None = None
    """Version of the weights that wrote a token; one further column may have the trainer's."""
    micro_batch: npt.NDArray[Any] | None = None
    rank: npt.NDArray[Any] | None = None
    sequence_weights: npt.NDArray[Any] | None = None
    """Importance weight of a token's sequence, before it is clamped."""
    text: npt.NDArray[Any] | None = None
    flipped: Mask | None = None
    """Where both sides chose other experts."""
    masked: bool = True
    """Whether the file has a mask."""

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.starts) - 1

    @cached_property
    def finite(self) -> Mask:
        """Where both log-probabilities are finite."""
        return np.isfinite(self.trainer) & np.isfinite(self.engine)

    @cached_property
    def counted(self) -> npt.NDArray[np.int64]:
        """Return the places that are judged: inside the mask, and finite on both sides, [k]."""
        return np.flatnonzero(self.mask & self.finite)

    @cached_property
    def gap(self) -> F64:
        """Engine minus trainer at the counted places, in nats, [k]."""
        return self.engine[self.counted] - self.trainer[self.counted]

    @cached_property
    def size(self) -> F64:
        """Absolute gap at the counted places, [k]."""
        return np.abs(self.gap)

    @cached_property
    def at(self) -> npt.NDArray[np.int64]:
        """Which counted token of its sequence each counted place is, from 0, [k]."""
        rows = self.row[self.counted]
        first = np.concatenate([[True], rows[1:] != rows[:-1]]) if len(rows) else np.zeros(0, np.bool_)
        begins = np.flatnonzero(first)
        return np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Counted tokens of each sequence, [sequences]."""
        return np.bincount(self.row[self.counted], minlength=self.rows)

    def of(self, column: npt.NDArray[Any]) -> F64:
        """Return a column at the counted places, [k]."""
        return np.asarray(column[self.counted], np.float64)

    def by_row(self, values: F64) -> F64:
        """Return the mean of values [k] in each sequence, [sequences]; NaN where none is counted."""
        with np.errstate(invalid="ignore"):
            return np.bincount(self.row[self.counted], values, minlength=self.rows) / np.where(
                self.lengths, self.lengths, np.nan
            )


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What the mean absolute gap of two sound engines may be, in nats."""

    typical: float
    """The mean gap that is expected of rounding alone."""
    why: str
    """How it is known, as the end of a sentence."""
    measured: bool = False

    @property
    def allowed(self) -> float:
        """The largest mean gap that is called rounding."""
        return (2.0 if self.measured else ALLOWED) * self.typical


def floor_of(scored: ScoredTokens, dtype: str, layers: int, assumed: bool) -> NoiseFloor:
    """Return the noise: measured by a repeated or a more precise scoring where one is given, else from dtype and depth.

    The rounding errors of `layers` layers add up as a random walk: u · √layers, relative to logits whose size is taken to be
    one more than the mean log-probability. dtype: a key of `ROUNDING`. assumed: whether nobody said the dtype.
    """
    for column, what in ((scored.repeated, "a repeated scoring"), (scored.precise, "a scoring in higher precision")):
        if column is not None and len(scored.counted):
            distance = np.abs(scored.of(column) - scored.trainer[scored.counted])
            if np.isfinite(distance).all() and distance.mean() > 0:
                return NoiseFloor(float(distance.mean()), f"measured by {what}", measured=True)
    scale = 1.0 + float(np.abs(scored.trainer[scored.counted]).mean()) if len(scored.counted) else 1.0
    why = f"{'assumed' if assumed else 'from'} {dtype} and {layers} layers"
    return NoiseFloor(ROUNDING[dtype] * SUMS.get(dtype, 1.0) * layers**0.5 * scale, why)
