"""`trainprobe runs DIR`: which runs a folder holds, with their ranks, steps, sizes and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.engine.storage.dumps.layout import FINDINGS_FILE, find_steps, holds_dump, trainings_in
from trainprobe.engine.storage.step_counts import shortfall
from trainprobe.errors import FormatError, UsageError
from trainprobe.monitor.findings import causes
from trainprobe.monitor.remote_run import as_given, is_copy, origin, run_folder
from trainprobe.monitor.run_folder import find_logs, steps_of_log

NARROWEST = 80  # columns of a terminal


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run's folder. ranks: those of which anything is there, of `world_size`; bytes: of all its files.

    steps, fewest_steps: how many different ones the rank that has most of them logged, and the one that has fewest. findings:
    one a cause, as `trainprobe judge` shows them. recorded: "4 of 300 steps recorded", empty where no step is missing.
    """

    folder: str
    format: str
    ranks: int
    world_size: int
    steps: int
    fewest_steps: int
    first_step: int | None
    last_step: int | None
    dumped_steps: int
    bytes: int
    findings: dict[str, int]
    recorded: str = ""


def runs(
    folder: Annotated[
        Path, typer.Argument(help="folder with runs, or the folder of one, or its URL", metavar="DIR", parser=as_given)
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="one JSON object per run")] = False,
    compact: Annotated[
        bool, typer.Option("--compact", help="first store once what data-parallel replicas have in common, in closed segments")
    ] = False,
) -> int:
    """List the runs in DIR and in the folders under it: format, ranks, steps, size, findings."""
    folder = run_folder(folder)
    if not folder.is_dir():
        raise FormatError(f"{folder} is no folder: name one that holds what runs wrote (`output` of their plans)")
    if compact and is_copy(folder):
        raise UsageError(f"--compact changes files, and {origin(folder)} is read through a copy: run it where the files are")
    if compact:
        from trainprobe.monitor.fleet.compacting import compact_runs

        compact_runs(folder)
    found = [_describe(run, logs) for run, logs in _find(folder)]
    if not found:
        raise FormatError(f"{folder} holds no run: no metrics-*.parquet, no records.jsonl and no dump (step{{N}}/rank{{R}}/)")
    if json:
        for run in found:
            typer.echo(orjson.dumps(asdict(run)).decode())
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("run", "ranks", "steps", "dumped", "size", "findings"):
        text = column in ("run", "findings")
        table.add_column(column, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for run in found:
        count = str(run.steps) if run.fewest_steps == run.steps else f"{run.fewest_steps} to {run.steps}"
        span = f"{count} ({run.first_step} to {run.last_step})" if run.steps else "–"
        ranks = str(run.ranks) if run.ranks == run.world_size else f"{run.ranks} of {run.world_size}"
        findings = ", ".join(f"{n} {severity}" for severity, n in run.findings.items()) or ("" if run.recorded else "none")
        findings = ": ".join(filter(None, [run.recorded, findings]))
        name = str(Path(run.folder).relative_to(folder))
        table.add_row(name, ranks, span, str(run.dumped_steps or "–"), _size(run.bytes), findings)
    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    console.print(table)
    return 0


def _find(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield (run's folder, its logs by rank); a run is a folder with folders of ranks or steps in it."""
    logs: dict[Path, list[Path]] = {}
    for log in chain(find_logs(folder), *map(find_logs, trainings_in(folder))):
        rank = log if log.is_dir() else log.parent
        logs.setdefault(rank.parent, []).append(log)
    for step in folder.rglob("step*/rank*"):
        run = step.parent.parent
        if run not in logs and step.is_dir() and holds_dump(step) and find_steps(run):
            logs[run] = []
    yield from sorted(logs.items())


def _describe(run: Path, logs: list[Path]) -> ListedRun:
    logged = [steps_of_log(log) for log in logs]
    steps = [{step for step, _ in each} for each in logged]
    of_all = set[int]().union(*steps)
    dumped = find_steps(run)
    formats = [*dict.fromkeys("columns" if log.is_dir() else "lines" for log in logs), *(["dump"] if dumped else [])]
    ranks = len(logs) or max((len(list(step.glob("rank*"))) for step in dumped.values()), default=0)
    folders = {log if log.is_dir() else log.parent for log in logs} | {file.parent for file in run.glob(f"*/{FINDINGS_FILE}")}
    found = [finding for folder in sorted(folders) for finding in read_findings(folder)]
    return ListedRun(
        str(run),
        " + ".join(formats),
        ranks,
        max([ranks, *(place.world_size for each in logged for _, place in each[-1:])]),
        max(map(len, steps), default=0),
        min(map(len, steps), default=0),
        min(of_all, default=None),
        max(of_all, default=None),
        len(dumped),
        sum(file.stat().st_size for file in run.rglob("*") if file.is_file()),
        dict(Counter(finding.severity for finding in causes(found))),
        shortfall(run, Counter(place.rank for each in logged for _, place in each)),
    )


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"
