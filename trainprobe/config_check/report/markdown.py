"""A comparison as Markdown, to paste into an issue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.config_check.report import MARK
from trainprobe.config_check.report.tables import grouped_rows, summary_rows

MOST_ROWS = 50


def write(comparison: PackComparison, path: Path) -> None:
    """Write the sentence, the verdicts and the first rows that differ."""
    lines = [f"<!-- {MARK} -->", f"**{_cell(comparison.sentence)}**", ""]
    lines += [_cell(comparison.consequences), ""] if comparison.consequences else []
    lines += [f"bench: `{comparison.bench}`, cmp: `{comparison.cmp}`", ""]
    lines += _table(("check", "verdict", "what differs"), summary_rows(comparison))
    for check in comparison.checks:
        rows, left_out = grouped_rows(check, MOST_ROWS, passed=False)
        if rows:
            lines += ["", f"### {check.name}", "", *_table(check.columns, rows)]
            lines += ["", f"{left_out} more rows are in the other reports."] if left_out else []
    lines += ["", *(f"- {_cell(note)}" for note in comparison.notes)]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _table(columns: tuple[str, ...], rows: list[Any]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(_cell(v) for v in row)} |" for row in rows]


def _cell(value: Any) -> str:
    """Return text that stays inside its cell and is no markup."""
    text = re.sub(r"\s+", " ", str(value))
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)
