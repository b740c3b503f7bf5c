"""`trainprobe report RUN`: writes the page of a recorded run."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.engine.core.findings import in_folder
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.errors import UsageError
from trainprobe.monitor.findings import all_findings, exit_code
from trainprobe.monitor.history import History
from trainprobe.monitor.looked_at import LookedAt
from trainprobe.monitor.remote_run import as_given, is_copy, origin, run_folder
from trainprobe.monitor.report import write_page
from trainprobe.monitor.report.from_run import collect_histories, view_of
from trainprobe.monitor.report.run_view import RunView
from trainprobe.monitor.report.traces import dumps_of, trace_of
from trainprobe.monitor.rules_of_run import left_out, rules_of_run
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.two_runs import add_run, departures, first_departure, notes_on
from trainprobe.monitor.watcher import judge_run


class PageService(Enum):
    """Whom `report` can give the page to; the sink of that name sends the run."""

    WANDB = "wandb"
    MLFLOW = "mlflow"


def report(
    folder: Annotated[Path, typer.Argument(help="folder that the run wrote to, or its URL", metavar="RUN", parser=as_given)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the page; by default RUN/report.html, of a URL ./report.html")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="by default the folder's name")] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="only what the rules find now, without what the run itself found")
    ] = False,
    beside: Annotated[
        Path | None,
        typer.Option(help="another run: the first difference, its curves, and maps of the distances", parser=as_given),
    ] = None,
    floor: Annotated[
        Path | None,
        typer.Option(help="with --beside: one of the two runs again, which measures what rounding does", parser=as_given),
    ] = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="all ranks at once: which differ from their replicas, and when")
    ] = False,
    to: Annotated[PageService | None, typer.Option("--to", help="also give the page to this service, as an artifact")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="--fleet on a Ray cluster whose machines see the same paths")] = False,
) -> int:
    """Write one self-contained HTML page of the run in RUN.

    Exit code: 0, or 3 there is nothing to show, or nothing was found and the record is incomplete.
    """
    folder = run_folder(folder)
    if floor is not None and beside is None:
        raise UsageError("--floor needs --beside OTHER, the run that RUN is compared with")
    home = Path() if is_copy(folder) else folder if folder.is_dir() else folder.parent
    target = output or home / "report.html"
    if fleet:
        from trainprobe.monitor.fleet.command import report_all_ranks

        return report_all_ranks(folder, ray, target, title or folder.resolve().name)
    console = Console(highlight=False, soft_wrap=True)
    view = view_of_run(folder, title, judge, beside, floor, console)
    page = write_page(view, target)
    console.print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", markup=False)
    if to is not None:
        where = import_module(f"trainprobe.engine.storage.sinks.{to.value}").upload(page, folder if folder.is_dir() else home)
        console.print(f"{to.value}: {where}", markup=False)
    empty = not view.scalars and not view.metrics
    if empty:
        console.print(f"{folder} holds no step that could be judged: the page is empty", markup=False)
    return 3 if empty or exit_code(view.findings, bool(view.recorded)) == 3 else 0


def view_of_run(
    folder: Path,
    title: str | None = None,
    judge: bool = False,
    beside: Path | None = None,
    floor: Path | None = None,
    console: Console | None = None,
) -> RunView:
    """Return what the page of a run shows; the parameters are those of `report`. console: is told what is worth a line."""
    histories: dict[int, History] = {}
    recorded = read_findings(folder)
    seen = LookedAt(folder)
    frames = seen.passing(collect_histories(read_frames(folder), histories))
    rules, absent = rules_of_run(folder)
    judged_now, unjudged = judge_run(frames, rules)
    found = [in_folder(finding, origin(folder)) for finding in judged_now]
    findings = [one.finding for one in all_findings([] if judge else recorded, found)]
    by = ["the run itself"] if recorded and not judge else []
    meta = {"findings by": ", ".join([*by, "rules applied when this page was written"])}
    view = view_of(title or folder.resolve().name, histories, meta)
    short = seen.shortfall(folder)
    sentences = [*filter(None, [short]), *seen.lacking(), *filter(None, [left_out(absent)])]
    notes = [*(f"{sentence}." for sentence in sentences), *view.notes, *filter(None, [unjudged])]
    view = replace(view, findings=findings, recorded=short, notes=notes, trace=partial(trace_of, dumps_of(folder)))
    console = console or Console(quiet=True)
    if short:
        console.print(f"{short}: the page shows no others", markup=False)
    if beside is not None:
        view = _with_another_run(view, histories, run_folder(beside), floor and run_folder(floor), console)
    return view


def _with_another_run(
    view: RunView, histories: dict[int, History], other: Path, floor: Path | None, console: Console
) -> RunView:
    """Return the page with another run on it, and print where the two part."""
    name = other.resolve().name
    there, third = _histories(other), _histories(floor) if floor is not None else None
    found = departures(histories, there, third)
    first = first_departure(found, name, third is not None)
    notes = notes_on(histories, there, name, found)
    for sentence in (*([first.message] if first is not None else []), *notes):
        console.print(sentence, markup=False)
    return add_run(view, view_of(name, there, {}), name, found, first, notes)


def _histories(folder: Path) -> dict[int, History]:
    histories: dict[int, History] = {}
    for _ in collect_histories(read_frames(folder), histories):
        pass
    return histories
