"""One run of `op-check`: judge the dumps, conclude, write what was asked for, and print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainprobe.comparison.terminal import say, wide_console
from trainprobe.engine.core.processes import cores, on_cores
from trainprobe.engine.core.ray_cluster import on_ray
from trainprobe.errors import UsageError
from trainprobe.op_check import report
from trainprobe.op_check.classic.precision import read_details, write_precision
from trainprobe.op_check.classic.tables import folder_of, places, stamped, write_details
from trainprobe.op_check.conclusion import Conclusion, conclude
from trainprobe.op_check.dump import DumpChecked, Measure, Row, check_dump, rank_folders
from trainprobe.op_check.page import write_page
from trainprobe.op_check.pairs import three_way
from trainprobe.op_check.replay import write_replay
from trainprobe.op_check.standards.measured import outputs, outputs_and_second
from trainprobe.op_check.standards.report import StandardResult, conclude_by, pair, records, results_by, standard_named, table

WORTH_PROCESSES = 64 << 20  # bytes of dumps that are worth starting processes for
Run = Callable[..., Iterator[DumpChecked]]
Progress = Callable[[bool], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True, slots=True)
class Request:
    """What to judge and what to write. dumps: one, or two of the same steps. digits: of the numbers in the classic files.

    threads: CPU threads in all, of each task on a Ray cluster; 0 means all cores where there are several ranks or steps.
    """

    dumps: Sequence[Path]
    ops: Sequence[str] = ()
    skip: Sequence[str] = ()
    standard: str | None = None
    json: Path | None = None
    csv: Path | None = None
    html: Path | None = None
    classic_csv: Path | None = None
    digits: int = 14
    replay: Path | None = None
    quiet: bool = False
    ray: bool = False
    threads: int = 0


@dataclass(slots=True)
class Answer:
    """What a request comes to. by: results by the standard that was asked for, and its name."""

    found: list[DumpChecked]
    conclusion: Conclusion
    by: list[StandardResult] = field(default_factory=list[StandardResult])
    standard: str = ""

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all dumps."""
        return [row for each in self.found for row in each.rows]


def carried_out(request: Request, progress: Progress) -> Conclusion:
    """Carry out a request; return what it came to. Raises UsageError, FormatError and OutputError."""
    result = judge(request, progress)
    _write(request, result)
    _print(request, result)
    return result.conclusion


def _spread(request: Request, folders: Sequence[Path]) -> tuple[Run | None, int]:
    """Return how to judge these folders at once, None for one after the other, and the threads of each task."""
    if request.ray:
        return on_ray, max(1, request.threads)
    stored = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    wanted = request.threads or (cores() if stored >= WORTH_PROCESSES else 1)
    processes = min(wanted, len(folders))
    if processes < 2:
        return None, wanted
    return (lambda function, tasks, _: on_cores(function, tasks, processes)), wanted // processes


def judge(request: Request, progress: Progress) -> Answer:
    """Judge the dumps. Raises UsageError where an operator or a standard is not known, FormatError where there is no dump."""
    standard = "" if request.standard is None else standard_named(request.standard)
    folders = [rank_folders(path) for path in request.dumps]
    two = len(folders) > 1
    measure: Measure | None = outputs if request.classic_csv is not None or standard else None
    if standard in ("ulp", "benchmark", "by-operator") and not two:
        measure = outputs_and_second
    found: list[DumpChecked] = []
    for each in folders:
        with progress(request.quiet) as advance:
            run, threads = _spread(request, [folder for _, _, folder in each])
            options: dict[str, Any] = {"keys": two, "measure": measure, "run": run, "threads": threads}
            found.append(check_dump(each, request.ops, advance, skip=request.skip, **options))
    if request.ops and not found[0].rows:
        dump, names = request.dumps[0], ", ".join(request.ops)
        raise UsageError(f"{dump} has no call of {names}: `trainprobe op-check {dump}` lists its operators")
    ours = three_way(*found) if two else conclude(found[0])
    if not standard:
        return Answer(found, ours)
    if two:
        pair(found[0].rows, found[1].rows)
    by = list(results_by(found[0].rows, standard))
    return Answer(found, conclude_by(standard, by, ours), by, standard)


def _write(request: Request, result: Answer) -> None:
    by = {"name": result.standard, "results": records(result.by)} if result.standard else None
    if request.json is not None:
        report.write_document(result.rows, result.conclusion, request.json, by)
    if request.csv is not None:
        report.write_lines(result.rows, request.csv)
    if request.html is not None:
        write_page(result.rows, result.conclusion, request.dumps, by, request.html)
    if request.classic_csv is not None:
        _write_classic(request.classic_csv, request.digits, result)


def _write_classic(folder: Path, digits: int, result: Answer) -> None:
    """Write the files of each dump; of two, in folders A and B, and what they come to against each other beside them."""
    stamp = stamped()
    if len(result.found) == 1:
        write_details(result.found[0].rows, folder, stamp, digits)
        return
    a, b = (
        dict(zip(places(each.rows), write_details(each.rows, folder / side, stamp, digits), strict=True))
        for side, each in zip("AB", result.found, strict=True)
    )
    for at in [place for place in a if place in b]:
        into = folder_of(folder, *at, len(a) > 1)
        write_precision(read_details(a[at]), read_details(b[at]), into, stamp)


def _print(request: Request, result: Answer) -> None:
    conclusion, dump = result.conclusion, request.dumps[0]
    console = wide_console()
    if request.quiet:
        say(console, conclusion.sentence)
    else:
        report.show([] if result.by else result.rows, conclusion, console)
        if result.by:
            console.print(table(result.by))
    if conclusion.worst is None:
        return
    if request.replay is not None:
        say(console, f"replay: python {write_replay(conclusion.worst, request.replay)}")
    elif conclusion.code in (1, 2) and not request.quiet:
        say(console, f"replay: trainprobe op-check {dump} --op {conclusion.worst.entry} --replay replay")
