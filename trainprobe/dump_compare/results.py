"""What a comparison of two dumps found: a result for each rank and step, and the verdict over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainprobe.comparison.verdict import Verdict
from trainprobe.dump_compare.between_steps import NO_WEIGHTS, WeightsOfStep
from trainprobe.dump_compare.judge import Judged, Outcome
from trainprobe.dump_compare.pairing import RankPair


@dataclass(frozen=True, slots=True)
class Compared:
    """One rank of one step. framework, framework_b: of A and of B, as entries are named.

    unread: why stored values could not be read. notes: what a third run lacks, or what was left out. made: what else was asked
    for of it, by name (see compare_rank). agreeing: how many calls agree and are not among `calls` (see parallel_ranks).
    by_structure: module of A that was not paired by name → what it was paired by (see renamed).
    world: how many ranks A's run had. by_statistics: how many values are equal in all statistics that both dumps hold, where
    nothing else tells of them. values: how many values there are of the calls, whatever was found of them.
    recorded: "optimizer" where A holds operators of the optimizer, "states" where it holds gradients as that sees them.
    cut: whether the dumps of A and of B say that the step did not end.
    rates: sentences on learning rates that the dumps report, and that one side has otherwise.
    weights: of two frameworks, the weights as the step begins and as its optimizer leaves them (see between_steps).
    joined: whether these are calls of all ranks of two layouts, joined; `at` then names A's lowest rank and the steps' folders.
    """

    at: RankPair
    calls: Sequence[Judged]
    framework: str = "pytorch"
    framework_b: str = "pytorch"
    unread: Sequence[str] = ()
    notes: Sequence[str] = ()
    made: dict[str, Any] = field(default_factory=dict[str, Any])
    joined: bool = False
    agreeing: Mapping[Outcome, int] = field(default_factory=dict[Outcome, int])
    by_structure: Mapping[str, str] = field(default_factory=dict[str, str])
    recorded: frozenset[str] = frozenset()
    by_statistics: int = 0
    values: int = 0
    world: int = 1
    cut: tuple[bool, bool] = False, False
    rates: Sequence[str] = ()
    weights: WeightsOfStep = NO_WEIGHTS


@dataclass(frozen=True, slots=True)
class DumpsVerdict(Verdict):
    """What a comparison of two dumps comes to. first: the first place where they differ. counts: of calls, by outcome."""

    first: tuple[Compared, Judged] | None = None
    counts: Mapping[Outcome, int] = field(default_factory=dict[Outcome, int])
