"""What a signature says of a cause, and what all signatures ask of the gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.rollout.logprobs.tokens import F64, Mask, NoiseFloor, ScoredTokens


@dataclass(frozen=True, slots=True)
class GapCause:
    """A cause with its evidence."""

    name: str
    """One or two words, as JSON has it."""
    sentence: str
    """What is the matter, as the beginning of a sentence without a full stop."""
    explains: float
    """The share of the gap above noise that it accounts for, 0 to 1."""
    tokens: str
    """Which tokens."""
    advice: str
    """What to try, as a sentence."""
    evidence: dict[str, float]
    """The numbers that it rests on."""
    telling: bool = False
    """Whether no other cause leaves this pattern, though it explains less than `SURE_ENOUGH`."""

    @property
    def sure(self) -> str:
        """How sure the answer is."""
        return "surely" if self.explains >= 0.9 else "probably" if self.explains >= SURE_ENOUGH or self.telling else "perhaps"


SURE_ENOUGH = 0.6


def above(size: F64, floor: NoiseFloor) -> F64:
    """Return how far absolute gaps [k] are above what rounding does."""
    return np.maximum(size - floor.allowed, 0.0)


def share(part: Mask, excess: F64) -> float:
    """Return the share of an excess [k] that lies in a part of the tokens; 0 where there is none."""
    total = float(excess.sum())
    return float(excess[part].sum()) / total if total > 0 else 0.0


def ranks(values: npt.NDArray[Any]) -> F64:
    """Return the ranks of values [k], equal ones sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[inverse]


def correlation(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
    """Return Pearson's correlation of two arrays [k]; 0 where one of them is constant."""
    if len(x) < 3:
        return 0.0
    a, b = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0


def grouped(values: F64, group: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], F64, npt.NDArray[np.int64]]:
    """Return each group's name, its mean of values [k], and its count, in the order of the names."""
    names, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
    return names, np.bincount(inverse, values) / counts, counts


def all_of(scored: ScoredTokens) -> str:
    """Name all counted tokens."""
    return f"all {len(scored.counted):,} tokens"
