"""A comparison as one self-contained HTML page."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from trainprobe.config_check.compare.verdicts import Comparison
from trainprobe.config_check.report.tables import grouped_rows, summary_rows
from trainprobe.engine.storage.html_page import make_page, shared

MOST_ROWS = 2000
_OWN = ("page.html", "page.css", "page.js")


def write(comparison: Comparison, path: Path) -> None:
    """Write the sentence, the verdicts and all rows that differ (2000 a check)."""
    folder = files("trainprobe.config_check.report")
    parts = [shared("verdict_head.html"), *(folder / name for name in _OWN), shared("foot.html")]
    path.write_text(make_page("Config check", "config-check", parts, _describe(comparison)), encoding="utf-8")


def _describe(comparison: Comparison) -> dict[str, Any]:
    """Return what the page shows; cells are text, as the other reports have them."""
    tables: list[dict[str, Any]] = []
    for check in comparison.checks:
        rows, left_out = grouped_rows(check, MOST_ROWS, passed=False)
        if rows:
            more = f"{left_out} more rows are in the other reports." if left_out else ""
            tables.append({"title": check.name, "columns": check.columns, "rows": _as_text(rows), "more": more})
    return {
        "sentence": comparison.sentence,
        "consequences": comparison.consequences,
        "code": comparison.exit_code,
        "paths": [comparison.bench, comparison.cmp],
        "summary": summary_rows(comparison),
        "tables": tables,
        "notes": comparison.notes,
    }


def _as_text(rows: list[tuple[Any, ...]]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in rows]
