"""The rows of a check as people read them: what differs first, ranks with the same row in one."""

from __future__ import annotations

from typing import Any

from trainprobe.config_check.compare.verdicts import Check, PackComparison
from trainprobe.engine.core.words import spans

_WEIGHT = {"error": 0, "warning": 1, "note": 2, "pass": 3}


def summary_rows(comparison: PackComparison) -> list[tuple[str, str, str]]:
    """Return (check, verdict, first findings) of each check."""
    rows: list[tuple[str, str, str]] = []
    for check in comparison.checks:
        texts = [f.text for f in check.findings if f.level != "note"] or [f.text for f in check.findings]
        text = "; ".join(dict.fromkeys(texts[:3])) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
        missing = "not compared" if check.findings else "not captured"
        verdict = check.verdict if check.compared or check.verdict != "pass" else missing
        rows.append((check.name, verdict, text))
    return rows


def grouped_rows(check: Check, most: int, *, passed: bool = True) -> tuple[list[tuple[Any, ...]], int]:
    """Return at most `most` rows, gravest first, and how many were left out. Rows that only differ in rank become one."""
    at = check.columns.index("rank") if "rank" in check.columns else -1
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in check.rows:
        if passed or row[-1] != "pass":
            groups.setdefault(tuple(v for i, v in enumerate(row) if i != at), []).append(row[at] if at >= 0 else 0)
    rows: list[tuple[Any, ...]] = []
    for rest, ranks in groups.items():
        rows.append((*rest[:at], spans(ranks), *rest[at:]) if at >= 0 else rest)
    rows.sort(key=lambda row: _WEIGHT.get(row[-1], 3))
    return rows[:most], max(0, len(rows) - most)
