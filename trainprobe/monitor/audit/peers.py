"""What the ranks tell each other at an audited step, as it is once it has arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Key = tuple[str, str]  # name of the parameter, slot


@dataclass(frozen=True, slots=True)
class GradientShare:
    """A rank's piece of one gradient. value: key of the parameter's value. over: axes over which others hold the same piece,
    None if not known yet. unclipped, clipped: its norm before and after clipping. doubted: equal values alone do not show
    that it is replicated. piece: a digest of the rectangle that it is, the same for the same one; 0 where it is the whole.
    """

    value: int
    over: frozenset[str] | None
    unclipped: float
    clipped: float
    doubted: bool = False
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """What one rank sent. axes: its index on each. numbers, marks: see `messages`. rows: key → (fingerprint, norm).

    gradients: key of a parameter's gradient → the share of it that this rank holds.
    """

    rank: int
    axes: Mapping[str, int]
    numbers: Mapping[str, float]
    marks: Mapping[str, int]
    batches: tuple[int, ...]
    rows: Mapping[int, tuple[int, float]]
    projections: Mapping[int, float]
    gradients: Mapping[int, GradientShare] = field(default_factory=dict[int, GradientShare])
