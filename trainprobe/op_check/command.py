"""`trainprobe op-check`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trainprobe.errors import MissingExtra, UsageError, did_you_mean

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
    condition: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="run each call again with perturbed inputs instead of judging it: last-bit, noise, precision, swap, or "
            "nothing, which finds operators that are not deterministic; --json writes what `dump-compare --floor` reads",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="where --condition runs the calls, such as cuda:0 or npu:0")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's own number", min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the verdict")] = False,
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
    if condition is not None:
        return _conditions(folders[0], condition, op or (), device, json, quiet)
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


def _conditions(folders: Any, kind: str, names: Any, device: str, json: Path | None, quiet: bool) -> int:
    """Run all calls with perturbed inputs. Return 0, or 2 where equal inputs gave other bits, 3 where no call could be run."""
    from trainprobe.op_check import condition

    if kind not in condition.KINDS:
        raise UsageError(
            f"--condition {kind!r} is not known{did_you_mean(kind, [*condition.KINDS])}: {', '.join(condition.KINDS)}"
        )
    with _progress(quiet) as advance:
        found = condition.condition_dump(folders, kind, names, device, advance)
    if json is not None:
        condition.write(found, kind, json)
    for line in condition.sentences(found, kind, 0 if quiet else 12):
        _say(line)
    ran = [one for one in found if not one.reason]
    return 3 if not ran else 2 if kind == "nothing" and any(one.worst > 0 for one in ran) else 0


def _say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


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

    with _progress(quiet) as advance:
        return check_dump(folders, names, advance, keys=keys)


@contextmanager
def _progress(quiet: bool) -> Generator[Callable[[int, int], None]]:
    """Show a bar of the calls that are done, on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True) as bar:
        task = bar.add_task("operator calls")
        yield lambda done, total: bar.update(task, completed=done, total=total)
