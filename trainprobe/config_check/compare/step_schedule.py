"""Compares at which micro-steps the optimizer steps: gradient accumulation, and steps that were skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainprobe.config_check.compare.verdicts import PackFinding
from trainprobe.config_check.pack import RankPack
from trainprobe.engine.core.words import counted


def schedule_findings(a: RankPack, b: RankPack) -> list[PackFinding]:
    """Return how the optimizer steps of two ranks differ, [] where they do not or where a side does not know them."""
    left, right = _steps(a), _steps(b)
    common = min(len(left), len(right))
    if left[:common] == right[:common]:
        return []
    periods = [_period(steps) for steps in (left, right)]
    if None not in periods:
        words = " and ".join(_period_text(period, len(steps)) for period, steps in zip(periods, (left, right), strict=True))
        text = f"gradient accumulation differs: an optimizer step every {words}"
        return [PackFinding("error", text, "setting gradient_accumulation", ("setting global_batch_size",))]
    words = " and ".join(f"{counted(steps[common - 1], 'optimizer step')}" for steps in (left, right))
    text = f"optimizers step at other times: {words} before micro-step {common - 1}"
    return [PackFinding("error", text, "step schedule", ("setting ", "key ", "flag ", "lone ", "source "))]


def _steps(rank: RankPack) -> list[int]:
    """Return the optimizer steps that were done before each captured micro-step."""
    held: Mapping[int, Any] = rank.by_micro.get("weights") or rank.by_micro.get("dataset") or {}
    return [int(held[micro]["step"]) for micro in sorted(held) if "step" in held[micro]]


def _period(steps: Sequence[int]) -> int | None:
    """Return after how many micro-steps the optimizer steps, None where that is not regular."""
    return next((n for n in range(1, len(steps) + 1) if all(step == i // n for i, step in enumerate(steps))), None)


def _period_text(period: int | None, seen: int) -> str:
    return f"{seen} micro-steps or more" if period == seen else counted(period or 0, "micro-step")
