"""One spreadsheet for each key, with the columns that mindstudio-probe writes and the verdict of each array behind them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.sheet_cells import append, new_book
from trainprobe.rollout.folders import Address
from trainprobe.rollout.pairs import Pair

COLUMNS = (
    *("step", "rank", "micro_step", "id", "shape1", "shape2", "相同元素百分比(%)", "首个不匹配元素索引", "最大绝对误差"),
    *("最大相对误差", "误差在千分之一内元素占比(%)", "误差在百分之一内元素占比(%)", "verdict", "note"),
)
MOST_ROWS = 1_000_000  # a sheet ends at 1 048 576 rows


def write_sheets(rows: Iterable[tuple[Address, Pair | None, str, str]], output: Path) -> list[Path]:
    """Write `KEY.xlsx` for each key and return the paths; needs openpyxl (extra `xlsx`)."""
    keys: dict[str, list[tuple[Any, ...]]] = {}
    for address, pair, verdict, note in rows:
        keys.setdefault(address.key, []).append(_cells(address, pair, verdict, note))
    written: list[Path] = []
    for key, lines in keys.items():
        book = new_book("comparing key data")
        sheet: Any = book.active
        sheet.title = "Sheet1"
        append(sheet, COLUMNS)
        sheet.freeze_panes = "A2"
        for line in sorted(lines, key=lambda line: line[:3])[:MOST_ROWS]:
            append(sheet, line)
        if len(lines) > MOST_ROWS:
            append(sheet, (f"{len(lines) - MOST_ROWS} more rows were left out",))
        path = output / f"{key}.xlsx"
        with path.open("wb") as file:
            book.save(file)
        written.append(path)
    return written


def _cells(address: Address, pair: Pair | None, verdict: str, note: str) -> tuple[Any, ...]:
    item = int(address.item) if address.item.isdecimal() else address.item or 0
    place = (address.step, address.rank, address.micro, item)
    if pair is None:
        return (*place, *[None] * 8, verdict, note)
    shapes = (str(list(pair.shape1)), str(list(pair.shape2)))
    errors = (pair.max_abs, pair.max_relative, pair.within_thousandth, pair.within_hundredth)
    return (*place, *shapes, pair.equal, pair.first_mismatch, *errors, verdict, note)
