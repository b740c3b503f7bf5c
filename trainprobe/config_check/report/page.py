"""A comparison as one self-contained HTML page."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.config_check.report.tables import grouped_rows, summary_rows
from trainprobe.engine.storage.html_page import make_page, markup, shared

MOST_ROWS = 2000
_WRITTEN = 50  # rows of a table that can be read without a script
_OWN = ("page.html", "page.css", "page.js")


def write(comparison: PackComparison, path: Path) -> None:
    """Write the sentence, the verdicts and all rows that differ (2000 a check)."""
    folder = files("trainprobe.config_check.report")
    parts = [*(folder / name for name in _OWN), shared("foot.html")]
    tables, paths = _tables(comparison), [comparison.bench, comparison.cmp]
    summary = [(check, markup.verdict(found), text) for check, found, text in summary_rows(comparison)]
    written = {
        "head": markup.verdict_head(comparison.sentence, comparison.exit_code, paths, comparison.notes),
        "consequences": markup.element("p", comparison.consequences, id="consequences")
        if comparison.consequences
        else markup.Markup(),
        "summary": markup.table(
            ("check", "verdict", "what differs"), summary, (None, None, "text"), id="summary", class_="stacks"
        ),
        "tables": markup.joined(map(_written, tables)),
    }
    path.write_text(make_page("Config check", "config-check", parts, tables, written=written), encoding="utf-8")


def _written(table: dict[str, Any]) -> markup.Markup:
    """Return the card of a table with the rows that can be read without a script."""
    more = markup.element("p", table["more"], class_="hint") if table["more"] else None
    rows = [(*row[:-1], markup.verdict(row[-1])) for row in table["rows"][:_WRITTEN]]
    return markup.element(
        "section",
        markup.element("h2", table["title"]),
        markup.element("div", markup.table(table["columns"], rows, class_="stacks"), class_="scroll"),
        more,
        class_="card differs",
    )


def _tables(comparison: PackComparison) -> list[dict[str, Any]]:
    """Return what differs in each check; cells are text, as the other reports have them."""
    tables: list[dict[str, Any]] = []
    for check in comparison.checks:
        rows, left_out = grouped_rows(check, MOST_ROWS, passed=False)
        if rows:
            more = f"{left_out} more rows are in the other reports." if left_out else ""
            tables.append({"title": check.name, "columns": check.columns, "rows": _as_text(rows), "more": more})
    return tables


def _as_text(rows: list[tuple[Any, ...]]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in rows]
