"""A comparison as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from trainprobe.config_check.compare.verdicts import Comparison
from trainprobe.config_check.report import MARK
from trainprobe.config_check.report.tables import grouped_rows, summary_rows

MOST_ROWS = 2000
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 110rem; padding: 0 1.5rem }
body { color: #1c2330; background: #fff }
h1 { font-size: 1.35rem; line-height: 1.35 } h2 { font-size: 1.1rem; margin-top: 2rem }
p.paths, p.note { color: #5b6573 }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #e4e8ee }
td { font-variant-numeric: tabular-nums; max-width: 34rem; overflow-wrap: anywhere }
.pass { color: #17743a } .warning { color: #8a5a00 } .error { color: #b3261e } .note { color: #5b6573 }
@media (prefers-color-scheme: dark) { body { color: #dfe4ec; background: #14181f } th, td { border-color: #2b323d }
  .pass { color: #6cd394 } .warning { color: #e7b45c } .error { color: #ff8f86 } p.paths, p.note, .note { color: #97a2b2 } }
"""


def write(comparison: Comparison, path: Path) -> None:
    """Write the sentence, the verdicts and all rows that differ (2000 a check); every text is escaped."""
    parts = [f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=generator content='{MARK}'>"]
    parts += [
        f"<meta name=viewport content='width=device-width'><title>Config check</title><style>{_STYLE}</style></head><body>"
    ]
    parts += [f"<h1>{escape(comparison.sentence)}</h1>"]
    parts += [f"<p>{escape(comparison.consequences)}</p>"] if comparison.consequences else []
    parts += [f"<p class=paths>bench {escape(comparison.bench)}<br>cmp {escape(comparison.cmp)}</p>"]
    parts += [_table(("check", "verdict", "what differs"), summary_rows(comparison), level_at=1)]
    for check in comparison.checks:
        rows, left_out = grouped_rows(check, MOST_ROWS, passed=False)
        if rows:
            parts += [f"<h2>{escape(check.name)}</h2>", _table(check.columns, rows, level_at=-1)]
            parts += [f"<p class=note>{left_out} more rows are in the other reports.</p>"] if left_out else []
    parts += [f"<p class=note>{escape(note)}</p>" for note in comparison.notes]
    path.write_text("\n".join(parts) + "\n</body></html>\n", encoding="utf-8")


def _table(columns: tuple[str, ...], rows: list[Any], level_at: int) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "\n".join(_row(row, level_at % len(columns)) for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>\n{body}</table></div>"


def _row(row: Any, level_at: int) -> str:
    cells = (f"<td class='{escape(str(v))}'>" if i == level_at else "<td>" for i, v in enumerate(row))
    return f"<tr>{''.join(f'{cell}{escape(str(v))}</td>' for cell, v in zip(cells, row, strict=True))}</tr>"
