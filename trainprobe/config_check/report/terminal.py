"""A comparison on the terminal: the sentence first, then a verdict a check."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainprobe.config_check.compare.verdicts import Comparison
from trainprobe.config_check.report.tables import summary_rows

_COLOURS = {"pass": "green", "warning": "yellow", "error": "red", "not captured": "dim", "not compared": "yellow"}


def show(comparison: Comparison, console: Console) -> None:
    """Print a comparison; texts from packs are never taken for markup."""
    console.print(Text(comparison.sentence, style="bold"), soft_wrap=True)
    if comparison.consequences:
        console.print(Text(comparison.consequences), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("check", "verdict", "what differs"):
        table.add_column(column, overflow="fold")
    for name, verdict, text in summary_rows(comparison):
        table.add_row(name, Text(verdict, style=_COLOURS[verdict]), Text(text))
    console.print(table)
    for note in comparison.notes:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)
