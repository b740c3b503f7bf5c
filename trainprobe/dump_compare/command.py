"""`trainprobe dump-compare`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn

from trainprobe.comparison.ci_formats import Github, Junit, case_of, tell
from trainprobe.comparison.terminal import progress_bar, say, wide_console
from trainprobe.dump_compare.arguments import about_rates
from trainprobe.dump_compare.between_steps import NO_WEIGHTS, weights_of
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.frameworks import pair_frameworks, pair_states_of_frameworks
from trainprobe.dump_compare.intervals import ALIKE
from trainprobe.dump_compare.judge import Judged, judge_calls
from trainprobe.dump_compare.layouts.compare import Maker, compare_other_layouts
from trainprobe.dump_compare.page.comparison import page_of_rank, write_comparison
from trainprobe.dump_compare.pairing import CallPair, RankPair, find_rank, pair_ranks
from trainprobe.dump_compare.parallel_ranks import suitable, without_agreeing
from trainprobe.dump_compare.references import measure_condition, measure_floor, measure_truth
from trainprobe.dump_compare.renamed.by_structure import pair_modules
from trainprobe.dump_compare.renamed.composed import Composed
from trainprobe.dump_compare.renamed.fused import as_one
from trainprobe.dump_compare.renamed.mapping_files import MappingFile, read_mappings
from trainprobe.dump_compare.renamed.pairs import pair_renamed
from trainprobe.dump_compare.renamed.user_mapping import renaming, with_mapped_values
from trainprobe.dump_compare.report import show, write_calls
from trainprobe.dump_compare.result_schema import schema_text
from trainprobe.dump_compare.results import Compared, DumpsVerdict
from trainprobe.dump_compare.scale_factors import see_factors
from trainprobe.dump_compare.sheet import sheet_path, write_sheet
from trainprobe.dump_compare.verdict import judge_runs
from trainprobe.dump_compare.vis_db import vis_of_rank, write_vis_db
from trainprobe.engine.compare.uncollected import uncollected
from trainprobe.engine.core.json_schema import prints
from trainprobe.engine.core.naming import LEFT_OUT
from trainprobe.engine.core.processes import AnyRun
from trainprobe.engine.core.ray_cluster import on_ray
from trainprobe.engine.storage.step_counts import shortfall
from trainprobe.errors import CompareError, UsageError


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
    mapping: Annotated[
        list[Path] | None,
        typer.Option(help="a mapping file of mindstudio-probe (values, cells, layers or operators); may be given again"),
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
    layout: Annotated[
        Path | None,
        typer.Option(
            help="YAML that says how values of modules lie over ranks, where sizes do not say it (docs/dump_compare.md)",
            rich_help_panel="Other layouts",
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON schema of --json", is_eager=True, callback=prints(schema_text))
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="compare the ranks and steps on a Ray cluster whose machines see the same paths")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the verdict")] = False,
    junit: Junit = None,
    github: Github = False,
) -> int:
    """Find where two runs first differ. Exit code: 0 identical, 1 within rounding, 2 differ, 3 not comparable or incomplete."""
    renamed, mapped = Renaming.of(rename or ()), read_mappings(mapping or ())
    if xlsx and sheets is None:
        raise UsageError("--xlsx needs --sheets DIR, the folder that the sheets are written to")
    suffix = ".xlsx" if xlsx else ".csv"
    wanted: tuple[tuple[str, Path | None, Maker], ...] = (("page", html, page_of_rank), ("vis", vis, vis_of_rank))
    make = {name: maker for name, path, maker in wanted if path is not None}
    at = None if sheets is None else lambda pair: sheet_path(sheets, pair.step, pair.rank, suffix)
    run = on_ray if ray else None
    ranks, verdict = compare_dumps(
        a, b, renamed, at, floor, high_precision, make, layout, run=run, all_calls=bool(json or make), mapping=mapped
    )
    tell("dump-compare", [case_of(f"{a} and {b}", verdict.code, verdict.sentence, verdict.details)], junit, github)
    if json is not None:
        write_calls(ranks, verdict, json)
    if html is not None:
        write_comparison(ranks, verdict, (a, b), html)
    if vis is not None:
        write_vis_db([rank.made["vis"] for rank in ranks], vis)
    if quiet:
        say(wide_console(), verdict.sentence)
    else:
        show(ranks, verdict, wide_console())
    return verdict.code


@uncollected()
def compare_dumps(
    a: Path,
    b: Path,
    rename: Callable[[str], str] = str,
    sheet: Callable[[RankPair], Path] | None = None,
    floor: Path | None = None,
    high_precision: Path | None = None,
    make: Mapping[str, Maker] | None = None,
    layout: Path | None = None,
    *,
    run: AnyRun | None = None,
    all_calls: bool = True,
    mapping: MappingFile | None = None,
) -> tuple[list[Compared], DumpsVerdict]:
    """Compare two dumps, rank by rank, or as one model each where their layouts differ.

    sheet: returns where the sheet of a rank and step is written. layout: a table of splits (see split_table). run: carries out
    the comparisons of the ranks, or of the steps of two layouts, in this process or in others; chosen by the size of the dumps
    where it is None. all_calls: whether calls that agree are wanted too. Others are as for `compare_rank`. Raises FormatError
    where there is no dump, CompareError where nothing belongs together, and UsageError for what another layout does not allow.
    """
    joins = not any((sheet, floor, high_precision, mapping))
    across = compare_other_layouts(a, b, rename, make or {}, layout, run, all_calls=all_calls, joins=joins)
    ranks, missing = list(across.compared), list(across.missing)
    if ranks:
        _refuse_of_layouts({"--sheets": sheet, "--floor": floor, "--high-precision": high_precision, "--mapping": mapping})
    else:
        pairs, missing = pair_ranks(a, b)
        reused = across.opened if len(pairs) == 1 and run is None and a != b else {}
        sides = reused.get(pairs[0].a), reused.get(pairs[0].b)
        del across, reused  # of several ranks no two are in memory at once
        tasks = [
            partial(compare_rank, pair, rename, sheet and sheet(pair), floor, high_precision, make, mapping, sides)
            for pair in pairs
        ]
        run = run or suitable([folder for pair in pairs for folder in (pair.a, pair.b)])
        ranks = list(_with_progress(run(_whole if all_calls else _disagreeing, tasks), len(tasks)))
    short = {name: shortfall(path, sink="dump") for name, path in (("A", a), ("B", b))}
    return ranks, judge_runs(ranks, [*(f"{name}: {said}" for name, said in short.items() if said), *missing])


def _whole(task: Callable[[], Compared]) -> Compared:
    return task()


def _disagreeing(task: Callable[[], Compared]) -> Compared:
    return without_agreeing(task())


def _with_progress(ranks: Iterator[Compared], count: int) -> Iterator[Compared]:
    """Yield ranks as they are compared, behind a bar on the terminal where there are several."""
    with progress_bar("comparing ranks and steps", MofNCompleteColumn(), total=count, quiet=count < 2) as bar:
        for rank in ranks:
            yield rank
            if bar is not None:
                bar[0].advance(bar[1])


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
    mapping: MappingFile | None = None,
    opened: tuple[Side | None, Side | None] = (None, None),
) -> Compared:
    """Read one rank and step of both dumps and judge each call. Raises FormatError where one cannot be read.

    sheet: where a sheet of all values is written, a .csv or .xlsx, or None. floor, high_precision: dumps of a third run (see
    references). make: what else to work out of the rank while its dumps are open; the results stand in `Compared.made`.
    mapping: what mapping files say of names. opened: the two sides, where they were read before.
    """
    sides = opened[0] or Side(pair.a), opened[1] or Side(pair.b)
    calls, sides, notes, by_structure = _paired(*sides, rename, mapping)

    def measure(judged: Sequence[Judged]) -> None:
        for path, name, measure_with in (
            (floor, "--floor", measure_floor),
            (high_precision, "--high-precision", measure_truth),
        ):
            if path is None:
                continue
            if path.is_file() and measure_with is measure_floor:
                measure_condition(judged, sides, path, (pair.step, pair.rank))
                continue
            folder = find_rank(path, pair.step, pair.rank)
            if folder is None:
                notes.append(f"{name} {path} has no step {pair.step} of rank {pair.rank}")
            else:
                measure_with(judged, sides, Side(folder))

    notes += [
        f"{name} {note}"
        for name, side in zip("AB", sides, strict=True)
        for note in side.step_data.notes
        if note.startswith(LEFT_OUT)
    ]
    steps = [side.step_data.step for side in sides]
    if steps[0] != steps[1]:
        notes.append(f"A is step {steps[0]} and B is step {steps[1]}")
    judged = judge_calls(calls, *sides, measure)
    see_factors(judged, *sides)
    if sheet is not None:
        write_sheet(judged, *sides, sheet)
    made = {name: maker(pair, judged, sides) for name, maker in (make or {}).items()}
    unread = [*sides[0].unread, *sides[1].unread]
    frameworks = sides[0].step_data.framework, sides[1].step_data.framework
    kinds = {call.parent if call.kind == "op" else call.kind for call in (one.call for one in judged)}
    recorded = frozenset(name for name, kind in (("optimizer", "optimizer"), ("states", "state")) if kind in kinds)
    alike = sum(value.interval is ALIKE for one in judged if one.outcome == "identical" for value in one.values)
    return Compared(
        pair,
        judged,
        *frameworks,
        unread,
        notes,
        made,
        by_structure=by_structure,
        recorded=recorded,
        by_statistics=alike,
        values=sum(len(one.values) for one in judged),
        world=sides[0].step_data.place.world_size,
        weights=weights_of(judged, *sides) if len({*frameworks}) > 1 else NO_WEIGHTS,
        cut=(not sides[0].step_data.complete, not sides[1].step_data.complete),
        rates=about_rates({f"in {name}": side.step_data.scalars for name, side in zip("AB", sides, strict=True)}),
    )


def _paired(
    a: Side, b: Side, rename: Callable[[str], str], mapping: MappingFile | None
) -> tuple[list[CallPair], tuple[Side, Side], list[str], Mapping[str, str]]:
    """Return the pairs of calls, the sides as they are to be compared, what is to be said, and what was paired by structure."""
    idle: list[str] = []
    frameworks = a.step_data.framework, b.step_data.framework
    if mapping is not None:
        rename, idle = renaming(mapping, a, rename)
        if mapping.apis and len({*frameworks}) == 1:
            raise CompareError(f"the mapping names ms_api and pt_api, but A and B are both of {frameworks[0]}")
    if len({*frameworks}) == 1:
        pairs, sides, notes, by_structure = pair_renamed(a, b, rename)
    else:
        apis, values = (mapping.apis, mapping.values) if mapping is not None else ((), {})
        structure = pair_modules(a, b, rename)
        names = structure.renaming(rename)
        pairs, notes = pair_frameworks(a, b, names, apis, mapped=bool(values), looked_through=structure.looked_through)
        sides, notes = (a, b), [*structure.note(), *notes]
        held, lacking = pair_states_of_frameworks(a, b, names, pairs)
        pairs, notes = [*pairs, *held], [*notes, *lacking]
        if structure.fused:
            sides = composed = Composed(a), Composed(b)
            pairs, said = as_one(pairs, structure.fused, composed, shares=False)
            notes = [*notes, said]
        by_structure = structure.evidence()
    if mapping is not None and mapping.values:
        pairs, lost = with_mapped_values(pairs, *sides, mapping.values)
        idle += lost
    return pairs, sides, [*notes, *idle], by_structure


@dataclass(frozen=True, slots=True)
class Renaming:
    """Changes names of A: each pattern in turn."""

    rules: tuple[tuple[re.Pattern[str], str], ...]

    @staticmethod
    def of(rules: Sequence[str]) -> Renaming:
        """Read PATTERN=TEXT. Raises UsageError."""
        compiled: list[tuple[re.Pattern[str], str]] = []
        for rule in rules:
            pattern, equals, text = rule.partition("=")
            if not equals:
                raise UsageError(f"--rename {rule!r} has no '=': write PATTERN=TEXT, such as '^module\\.='")
            try:
                compiled.append((re.compile(pattern), text))
            except re.error as error:
                raise UsageError(f"--rename {rule!r} is no regular expression: {error}") from None
        return Renaming(tuple(compiled))

    def __call__(self, name: str) -> str:
        """Return the name as B has it."""
        for pattern, text in self.rules:
            name = pattern.sub(text, name)
        return name
