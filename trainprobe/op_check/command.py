"""`trainprobe op-check`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn

from trainprobe.comparison.ci_formats import Github, Junit, case_of, tell
from trainprobe.comparison.terminal import progress_bar, say
from trainprobe.engine.core.json_schema import prints
from trainprobe.errors import MissingExtra, UsageError, did_you_mean


def _schema() -> str:
    from trainprobe.op_check.result_schema import schema_text

    return schema_text()


def op_check(
    dump: Annotated[
        Path, typer.Argument(help="a dump: its folder, a step or a rank of it; this tool's or mindstudio-probe's", metavar="A")
    ],
    other: Annotated[
        Path | None, typer.Argument(help="a second dump of the same steps: which is nearer the truth", metavar="B")
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
    html: Annotated[Path | None, typer.Option(help="write one self-contained page here")] = None,
    standard: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="report by a standard of mindstudio-probe: absolute, binary, ulp, thousandth, benchmark, accumulative, or "
            "by-operator, which is the one that it assigns to each operator; our own verdict stands beside it",
        ),
    ] = None,
    classic_csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write accuracy_checking_*.csv and api_precision_compare_*.csv here")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="operator or entry to leave out; may be given again")] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json or config.yaml of mindstudio-probe: its white_list and black_list")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="judge the ranks on a Ray cluster whose machines see the same paths")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON schema of --json", is_eager=True, callback=prints(_schema))
    ] = False,
    condition: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="run each call again with perturbed inputs instead of judging it: last-bit, noise, precision, swap, or "
            "nothing, which finds operators that are not deterministic; --json writes what `dump-compare --floor` reads",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="where --condition runs the calls, such as cuda:0 or npu:0")] = "cpu",
    threads: Annotated[
        int,
        typer.Option(
            help="CPU threads in all, which ranks and steps judged at once share; 0 uses all cores. With --ray: of each rank",
            min=0,
        ),
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the verdict")] = False,
    junit: Junit = None,
    github: Github = False,
) -> int:
    """Judge each recorded operator call against a float64 reference of its own inputs.

    Exit code: 0 all are right within their own rounding, 1 some are suspicious or in another mode, 2 a bug, 3 some were
    not checked.
    """
    need_torch(threads)
    from trainprobe.op_check.answer import Request, carried_out
    from trainprobe.op_check.classic.configs import read_config

    lists = read_config(config) if config is not None else None
    ops, left_out = [*(op or ()), *(lists.white_list if lists else ())], [*(skip or ()), *(lists.black_list if lists else ())]
    paths = [path for path in (dump, other) if path is not None]
    if condition is not None:
        if junit is not None or github:
            raise UsageError("--junit and --github tell a judgement, and --condition judges nothing: leave one of them out")
        return _conditions(paths[0], condition, ops, device, json, quiet)
    digits = lists.precision if lists else 14
    request = Request(paths, ops, left_out, standard, json, csv, html, classic_csv, digits, replay, quiet, ray, threads)
    said = carried_out(request, progress)
    tell("op-check", [case_of(" and ".join(map(str, paths)), said.code, said.sentence, said.details, 0)], junit, github)
    return said.code


def _conditions(dump: Path, kind: str, names: Any, device: str, json: Path | None, quiet: bool) -> int:
    """Run all calls with perturbed inputs. Return 0, or 2 where equal inputs gave other bits, 3 where no call could be run."""
    from trainprobe.op_check import condition
    from trainprobe.op_check.dump import rank_folders

    if kind not in condition.KINDS:
        raise UsageError(
            f"--condition {kind!r} is not known{did_you_mean(kind, [*condition.KINDS])}: {', '.join(condition.KINDS)}"
        )
    with progress(quiet) as advance:
        found = condition.condition_dump(rank_folders(dump), kind, names, device, advance)
    if json is not None:
        condition.write(found, kind, json)
    for line in condition.sentences(found, kind, 0 if quiet else 12):
        say(Console(), line)
    ran = [one for one in found if not one.reason]
    return 3 if not ran else 2 if kind == "nothing" and any(one.worst > 0 for one in ran) else 0


def need_torch(threads: int) -> None:
    """Raise MissingExtra without torch; set its number of threads, unless that is 0."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch", "judging operators") from None
    if threads:
        torch.set_num_threads(threads)


@contextmanager
def progress(quiet: bool) -> Generator[Callable[[int, int], None]]:
    """Show a bar of the calls that are done, on a terminal."""
    with progress_bar("operator calls", MofNCompleteColumn(), quiet=quiet) as bar:
        yield lambda done, total: None if bar is None else bar[0].update(bar[1], completed=done, total=total)
