"""What the audited steps have shown of the classes of a loss function: how often each is a target, and how probable it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCalls

WINDOW = 15  # audited steps that are compared with as many before them
_FIRST = 3  # audited steps from whose targets' log-probability a training starts
_KINDS = frozenset({"cross_entropy", "nll_loss"})
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClassShares:
    """Of a training whose losses are all of one kind over the same classes.

    counts: [C], targets of each class so far. last: [2 C + 1] of each of the last 2 * `WINDOW` audited steps, as
    `LossCall.classes`, summed over the calls of the step. steps: how many there were in all. began: mean -log p(target) of the
    first `_FIRST` of them. smoothing: the largest label smoothing in use.
    """

    kind: str
    counts: Array
    last: tuple[Array, ...]
    steps: int
    began: float
    smoothing: float

    @property
    def never(self) -> tuple[int, ...]:
        """The classes that were never a target."""
        return tuple(int(c) for c in np.flatnonzero(self.counts == 0))

    @property
    def name(self) -> str:
        """What the same training is called on every rank."""
        return f"{self.kind} over {len(self.counts)}"

    def mass(self, latest: bool) -> Array:
        """Return [C], the mean probability of each class in the latest `WINDOW` audited steps, or in those before."""
        return _mean_mass(self.last[-WINDOW:] if latest else self.last[:-WINDOW])

    @property
    def looked_at(self) -> float:
        """Targets in the last 2 * `WINDOW` audited steps."""
        return float(sum(_counts(row).sum() for row in self.last))

    def surprise(self, latest: bool) -> float:
        """Return the mean -log p(target) in the latest `WINDOW` audited steps, or in those before."""
        return _mean_log(self.last[-WINDOW:] if latest else self.last[:-WINDOW])


def observed(known: ClassShares | None, evidence: Evidence) -> ClassShares | None:
    """Return what is known with one more audited step; None where its losses are not all of one kind over the same classes.

    A step without a loss function leaves it as it is.
    """
    calls = evidence.of(LossCalls).losses
    if not calls:
        return known
    if len({(call.kind, len(call.classes)) for call in calls}) > 1 or calls[0].kind not in _KINDS or not calls[0].classes:
        return None
    row, kind = np.sum([call.classes for call in calls], axis=0), calls[0].kind
    smoothing = max(call.smoothing for call in calls)
    if known is None or known.kind != kind or len(known.last[-1]) != len(row):
        return ClassShares(kind, _counts(row), (row,), 1, _mean_log([row]), smoothing)
    last = (*known.last, row)[-2 * WINDOW :]
    steps = known.steps + 1
    began = _mean_log(last) if steps <= _FIRST else known.began
    return ClassShares(kind, known.counts + _counts(row), last, steps, began, max(smoothing, known.smoothing))


def _counts(row: Array) -> Array:
    return row[: len(row) // 2]


def _mean_mass(rows: Sequence[Array]) -> Array:
    total = np.sum(rows, axis=0)
    return total[len(total) // 2 : -1] / max(1.0, _counts(total).sum())


def _mean_log(rows: Sequence[Array]) -> float:
    total = np.sum(rows, axis=0)
    return float(total[-1] / max(1.0, _counts(total).sum()))
