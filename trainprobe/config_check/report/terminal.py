"""A comparison on the terminal: the sentence first, then a verdict a check."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainprobe.comparison.terminal import say
from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.config_check.report.tables import summary_rows

_COLOURS = {"pass": "green", "warning": "yellow", "error": "red", "not captured": "dim", "not compared": "yellow"}


def show(comparison: PackComparison, console: Console) -> None:
    """Print a comparison; texts from packs are never taken for markup."""
    say(console, comparison.sentence, "bold")
    if comparison.consequences:
        say(console, comparison.consequences)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("check", "verdict", "what differs"):
        table.add_column(column, overflow="fold")
    for name, verdict, text in summary_rows(comparison):
        table.add_row(name, Text(verdict, style=_COLOURS[verdict]), Text(text))
    console.print(table)
    for note in comparison.notes:
        say(console, f"note: {note}", "dim")
