"""`trainprobe dump-compare`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.dump_compare import report
from trainprobe.dump_compare.conclude import Compared, Conclusion, conclude
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.frameworks import pair_frameworks
from trainprobe.dump_compare.judge import Judged, judge_calls
from trainprobe.dump_compare.layouts.compare import Maker, compare_other_layouts
from trainprobe.dump_compare.page.comparison import page_of_rank, write_comparison
from trainprobe.dump_compare.pairing import RankPair, find_rank, pair_calls, pair_ranks
from trainprobe.dump_compare.references import measure_condition, measure_floor, measure_truth
from trainprobe.dump_compare.result_schema import schema_text
from trainprobe.dump_compare.sheet import sheet_path, write_sheet
from trainprobe.dump_compare.vis_db import vis_of_rank, write_vis_db
from trainprobe.engine.compare.uncollected import uncollected
from trainprobe.errors import UsageError


def _print_schema(wanted: bool) -> None:
    if wanted:
        typer.echo(schema_text(), nl=False)
        raise typer.Exit


def dump_compare(
    a: Annotated[Path, typer.Argument(help="one dump: its folder, a step or a rank of it; any tool's")],
    b: Annotated[Path, typer.Argument(help="the other one")],
    json: Annotated[Path | None, typer.Option(help="write all calls with their verdicts here")] = None,
    sheets: Annotated[
        Path | None,
        typer.Option(help="write a CSV sheet a rank and step into this folder, with the columns of mindstudio-probe"),
    ] = None,
    xlsx: Annotated[bool, typer.Option("--xlsx", help="write those sheets as .xlsx, with colours")] = False,
    html: Annotated[Path | None, typer.Option(help="write one page here, with both sides as a tree beside each other")] = None,
    vis: Annotated[
        Path | None, typer.Option(help="write a .vis.db here, which the graph page of mindstudio-probe opens in TensorBoard")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="PATTERN=TEXT: names of A, by a regular expression; may be given again")
    ] = None,
    floor: Annotated[
        Path | None,
        typer.Option(
            help="dump of one side run again (repeated, other threads, `trainprobe floor`), or a file of "
            "`op-check --condition`: measures what rounding does"
        ),
    ] = None,
    high_precision: Annotated[
        Path | None, typer.Option(help="dump of the same step in higher precision: which side is further from it")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON schema of --json", is_eager=True, callback=_print_schema)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the verdict")] = False,
) -> int:
    """Find where two runs part. Exit code: 0 identical, 1 within rounding, 2 differ, 3 not comparable or incomplete."""
    renamed = _renaming(rename or ())
    if xlsx and sheets is None:
        raise UsageError("--xlsx needs --sheets DIR, the folder that the sheets are written to")
    suffix = ".xlsx" if xlsx else ".csv"
    wanted: tuple[tuple[str, Path | None, Maker], ...] = (("page", html, page_of_rank), ("vis", vis, vis_of_rank))
    make = {name: maker for name, path, maker in wanted if path is not None}
    at = None if sheets is None else lambda pair: sheet_path(sheets, pair.step, pair.rank, suffix)
    ranks, conclusion = compare_dumps(a, b, renamed, at, floor, high_precision, make)
    if json is not None:
        report.write_json(ranks, conclusion, json)
    if html is not None:
        write_comparison(ranks, conclusion, (a, b), html)
    if vis is not None:
        write_vis_db([rank.made["vis"] for rank in ranks], vis)
    console = Console()
    console = console if console.width >= report.WIDTH else Console(width=report.WIDTH)
    if quiet:
        console.print(conclusion.sentence, markup=False, highlight=False, soft_wrap=True)
    else:
        report.show(ranks, conclusion, console)
    return conclusion.code


def compare_dumps(
    a: Path,
    b: Path,
    rename: Callable[[str], str] = str,
    sheet: Callable[[RankPair], Path] | None = None,
    floor: Path | None = None,
    high_precision: Path | None = None,
    make: Mapping[str, Maker] | None = None,
) -> tuple[list[Compared], Conclusion]:
    """Compare two dumps, rank by rank, or as one model each where their layouts differ.

    sheet: returns where the sheet of a rank and step is written. Others: as for `compare_rank`. Raises FormatError where there
    is no dump, CompareError where nothing belongs together, UsageError for what another layout does not allow.
    """
    ranks, missing = compare_other_layouts(a, b, rename, make or {})
    if ranks:
        _refuse_of_layouts({"--sheets": sheet, "--floor": floor, "--high-precision": high_precision})
    else:
        pairs, missing = pair_ranks(a, b)
        ranks = [compare_rank(pair, rename, sheet and sheet(pair), floor, high_precision, make) for pair in pairs]
    return ranks, conclude(ranks, missing)


def _refuse_of_layouts(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} needs two dumps of one layout, rank by rank: these two split the model differently")


@uncollected()
def compare_rank(
    pair: RankPair,
    rename: Callable[[str], str] = str,
    sheet: Path | None = None,
    floor: Path | None = None,
    high_precision: Path | None = None,
    make: Mapping[str, Maker] | None = None,
) -> Compared:
    """Read one rank and step of both dumps and judge each call. Raises FormatError where one cannot be read.

    sheet: where a sheet of all values is written, a .csv or .xlsx, or None. floor, high_precision: dumps of a third run (see
    references). make: what else to work out of the rank while its dumps are open; the results stand in `Compared.made`.
    """
    sides = Side(pair.a), Side(pair.b)
    notes: list[str] = []
    if sides[0].step_data.framework == sides[1].step_data.framework:
        calls = pair_calls(sides[0].step_data.calls, sides[1].step_data.calls, rename)
    else:
        calls, notes = pair_frameworks(*sides, rename)

    def measure(judged: Sequence[Judged]) -> None:
        for path, name, told in ((floor, "--floor", measure_floor), (high_precision, "--high-precision", measure_truth)):
            if path is None:
                continue
            if path.is_file() and told is measure_floor:
                measure_condition(judged, sides, path, (pair.step, pair.rank))
                continue
            folder = find_rank(path, pair.step, pair.rank)
            if folder is None:
                notes.append(f"{name} {path} has no step {pair.step} of rank {pair.rank}")
            else:
                told(judged, sides, Side(folder))

    judged = judge_calls(calls, *sides, measure)
    if sheet is not None:
        write_sheet(judged, *sides, sheet)
    made = {name: maker(pair, judged, sides) for name, maker in (make or {}).items()}
    return Compared(pair, judged, sides[0].step_data.framework, [*sides[0].unread, *sides[1].unread], notes, made)


def _renaming(rules: Sequence[str]) -> Callable[[str], str]:
    compiled: list[tuple[re.Pattern[str], str]] = []
    for rule in rules:
        pattern, equals, text = rule.partition("=")
        if not equals:
            raise UsageError(f"--rename {rule!r} has no '=': write PATTERN=TEXT, such as '^module\\.='")
        try:
            compiled.append((re.compile(pattern), text))
        except re.error as error:
            raise UsageError(f"--rename {rule!r} is no regular expression: {error}") from None

    def renamed(name: str) -> str:
        for pattern, text in compiled:
            name = pattern.sub(text, name)
        return name

    return renamed
