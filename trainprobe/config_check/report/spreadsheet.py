"""A comparison as `result.xlsx`: a summary sheet and one sheet a check. No cell is a formula, whatever its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.config_check.report import MARK
from trainprobe.config_check.report.tables import grouped_rows, summary_rows
from trainprobe.engine.storage.sheet_cells import append, new_book

MOST_ROWS = 200_000  # a sheet ends at 1 048 576 rows, and a person long before
_COLOURS = {"pass": "C6EFCE", "warning": "FFEB9C", "error": "FFC7CE"}


def write(comparison: PackComparison, path: Path) -> None:
    """Write the workbook; needs openpyxl (extra `xlsx`)."""
    book = new_book("writing result.xlsx")
    book.properties.creator = MARK
    sheet: Any = book.active
    sheet.title = "summary"
    head: list[tuple[Any, ...]] = [
        (comparison.sentence,),
        (comparison.consequences,),
        ("bench", comparison.bench),
        ("cmp", comparison.cmp),
        (),
    ]
    for row in [*head, ("check", "pass_check", "what differs")]:
        _append(sheet, row)
    for row in summary_rows(comparison):
        _append(sheet, row, level_at=1)
    for row in [(), *((note,) for note in comparison.notes)]:
        _append(sheet, row)
    for check in comparison.checks:
        rows, left_out = grouped_rows(check, MOST_ROWS)
        sheet = book.create_sheet(check.name)
        _append(sheet, check.columns)
        sheet.freeze_panes = "A2"
        for row in rows:
            _append(sheet, row, level_at=len(row) - 1)
        if left_out:
            _append(sheet, (f"{left_out} more rows were left out",))
    for sheet in book:
        _widths(sheet)
    with path.open("wb") as file:
        book.save(file)


def _append(sheet: Any, row: tuple[Any, ...], level_at: int = -1) -> None:
    append(sheet, row, _COLOURS, level_at)


def _widths(sheet: Any) -> None:
    """Make columns as wide as their first rows need."""
    skipped = 5 if sheet.title == "summary" else 0
    for column in sheet.iter_cols(max_row=min(sheet.max_row, 200)):
        longest = max((len(str(cell.value)) for cell in column[skipped:] if cell.value is not None), default=8)
        sheet.column_dimensions[column[0].column_letter].width = min(max(10, longest + 2), 70)
