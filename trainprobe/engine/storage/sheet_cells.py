"""Cells of a spreadsheet: numbers stay numbers, and no text is a formula, whatever it says."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from trainprobe.errors import MissingExtra

_LONGEST = 32_000  # characters; a cell ends at 32 767
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
FORMULA = frozenset("=+-@\t\r\n")  # a text that begins with one of these is a formula to a spreadsheet


def new_book(purpose: str) -> Any:
    """Return an empty workbook. purpose: what needs it, for the MissingExtra that is raised without openpyxl."""
    try:
        from openpyxl import Workbook
    except ImportError:
        raise MissingExtra("openpyxl", "xlsx", purpose) from None
    return Workbook()


def defused(text: str) -> str:
    """Return the text of a CSV cell; one that a spreadsheet would take for a formula has an apostrophe before it."""
    return f"'{text}" if text and text[0] in FORMULA and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def write_rows(file: TextIO, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as CSV; no text is a formula, whatever it says."""
    csv.writer(file).writerows([defused(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)


def append(sheet: Any, row: Sequence[Any], colours: Mapping[str, str] | None = None, coloured: int = -1) -> None:
    """Append a row. colours: text → RRGGBB, for the cell with index `coloured`; None leaves a cell empty."""
    from openpyxl.cell import WriteOnlyCell
    from openpyxl.styles import PatternFill

    cells: list[Any] = []
    for i, value in enumerate(row):
        cell: Any = WriteOnlyCell(sheet)
        if value is None:
            pass
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53 and math.isfinite(value):
            cell.value = value
        else:
            text = _CONTROL.sub("�", str(value))[:_LONGEST]
            cell.value = text
            cell.data_type = "s"  # a text, even where it begins with =
            cell.quotePrefix = bool(text) and text[0] in FORMULA
        if colours and i == coloured and isinstance(value, str) and value in colours:
            cell.fill = PatternFill("solid", fgColor=colours[value])
        cells.append(cell)
    sheet.append(cells)
