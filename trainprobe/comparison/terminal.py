"""How a comparison is printed: lines that no terminal cuts, the verdict with its remarks, tables, a progress bar."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from trainprobe.comparison.verdict import Verdict

WIDTH = 140  # least columns of a table: a narrow terminal may wrap its lines, numbers must not be cut


def wide_console() -> Console:
    """Return a console for tables."""
    console = Console()
    return console if console.width >= WIDTH else Console(width=WIDTH)


def say(console: Console, line: str, style: str = "") -> None:
    """Print a line as it is: nothing in it is markup, and it is not wrapped."""
    console.print(Text(line, style=style), soft_wrap=True)


def show_verdict(
    verdict: Verdict, console: Console, most: int = 20, all_in: str = "--json lists all", sides: Sequence[str] = ()
) -> None:
    """Print the sentence, lines about the sides, and at most so many remarks. all_in: where all of them are."""
    say(console, verdict.sentence, f"bold {verdict.colours[verdict.code]}")
    for line in sides:
        say(console, line, "dim")
    for line in verdict.details[:most]:
        say(console, f"  • {line}")
    if len(verdict.details) > most:
        say(console, f"  • … and {len(verdict.details) - most} more ({all_in})")


def plain_table(heads: Sequence[str], numbers: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """Return a table without lines. numbers: heads of columns to the right. wrapped: heads of columns that may wrap."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right" if head in numbers else "left", no_wrap=head not in wrapped)
    return table


@contextmanager
def progress_bar(
    label: str, *columns: ProgressColumn, total: float | None = None, quiet: bool = False
) -> Generator[tuple[Progress, TaskID] | None]:
    """Show a bar on standard error while the block runs; give None where nobody looks.

    columns: what stands behind the bar. total: of the bar, None where the block tells it.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
        yield bar, bar.add_task(label, total=total)
