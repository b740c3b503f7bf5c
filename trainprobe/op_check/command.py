"""`trainprobe op-check`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trainprobe.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from trainprobe.op_check.dump import DumpChecked


def op_check(
    dump: Annotated[Path, typer.Argument(help="a dump: its folder, a step or a rank of it; this tool's or mindstudio-probe's")],
    other: Annotated[
        Path | None, typer.Argument(help="a second dump of the same steps: which of the two is nearer the truth")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(help="operator or entry to judge, such as layer_norm or Functional.linear.3; may be given again"),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="write the worst call's inputs and a script that runs it anywhere here")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write all results here")] = None,
    csv: Annotated[Path | None, typer.Option(help="write one line for each result here")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's own number", min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the verdict alone")] = False,
) -> int:
    """Judge each recorded operator call against a float64 reference of its own inputs.

    Exit code: 0 all are right within their own rounding, 1 some are suspicious or in another mode, 2 a bug, 3 some were
    not checked.
    """
    need_torch(threads)
    from trainprobe.op_check import report
    from trainprobe.op_check.conclusion import conclude
    from trainprobe.op_check.dump import rank_folders
    from trainprobe.op_check.pairs import three_way
    from trainprobe.op_check.replay import write_replay

    folders = [rank_folders(path) for path in (dump, other) if path is not None]
    found = [_checked(each, op or (), quiet, other is not None) for each in folders]
    if op and not found[0].rows:
        raise UsageError(f"{dump} has no call of {', '.join(op)}: `trainprobe op-check {dump}` lists its operators")
    conclusion = conclude(found[0])
    if other is not None:
        conclusion = three_way(found[0], found[1])
    rows = [row for each in found for row in each.rows]
    if json is not None:
        report.write_json(rows, conclusion, json)
    if csv is not None:
        report.write_csv(rows, csv)
    console = Console()
    console = console if console.width >= report.WIDTH else Console(width=report.WIDTH)
    if quiet:
        console.print(conclusion.sentence, markup=False, highlight=False, soft_wrap=True)
    else:
        report.show(rows, conclusion, console)
    if replay is not None and conclusion.worst is not None:
        console.print(f"replay: python {write_replay(conclusion.worst, replay)}", markup=False, highlight=False, soft_wrap=True)
    elif conclusion.worst is not None and conclusion.code in (1, 2) and not quiet:
        text = f"replay: trainprobe op-check {dump} --op {conclusion.worst.entry} --replay replay"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return conclusion.code


def need_torch(threads: int) -> None:
    """Raise MissingExtra without torch; set its number of threads, unless that is 0."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch", "judging operators") from None
    if threads:
        torch.set_num_threads(threads)


def _checked(folders: Any, names: Any, quiet: bool, keys: bool) -> DumpChecked:
    from trainprobe.op_check.dump import check_dump

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True) if not quiet and console.is_terminal else None
    around: AbstractContextManager[Any] = nullcontext() if bar is None else bar
    with around:
        task = None if bar is None else bar.add_task("operator calls")

        def advance(done: int, total: int) -> None:
            if bar is not None and task is not None:
                bar.update(task, completed=done, total=total)

        return check_dump(folders, names, advance, keys=keys)
