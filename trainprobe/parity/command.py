"""`trainprobe parity`."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Annotated

import orjson
import typer

from trainprobe.comparison.files import writing
from trainprobe.comparison.terminal import plain_table, say, wide_console
from trainprobe.comparison.verdict import Verdict
from trainprobe.dump_compare.command import compare_dumps
from trainprobe.engine.core.log_lines import say as log
from trainprobe.errors import FormatError, ProbeError, UsageError
from trainprobe.parity.layouts import TORCHRUN, Ran, last_lines, plan_of, read_layouts, run_layout

VERDICTS = ("identical", "rounding", "differ", "incomplete")


def parity(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT [ARGUMENTS]", help="The script and what it is given in every layout.", show_default=False
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", "-l", help="NAME=RANKS ARGUMENTS: processes, and what the script is given; at least twice."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the dumps.")] = Path("parity_out"),
    step: Annotated[
        list[int] | None, typer.Option(help="Step to compare, as the training counts; may be given again. [0]")
    ] = None,
    launcher: Annotated[str, typer.Option(help="Command that starts the processes; {ranks} is their number.")] = TORCHRUN,
) -> int:
    """Run one script in several layouts, and compare a step of each with that of all others.

    Give the script equal weights, samples and a run that ends after the step. Exit code: the worst of all pairs, as of
    `dump-compare`: 0 identical, 1 within rounding, 2 differ, 3 not comparable or a layout did not run.
    """
    script = list(words or [])
    if script and script[0] == "--":
        script.pop(0)
    if not script:
        raise UsageError(
            "nothing to run: give the script behind `--`, as in `trainprobe parity -l 'one=1' -l 'tp2=2 --tp 2' -- train.py`"
        )
    layouts = read_layouts(layout or [])
    plan = _write_plan(output, step or [0])
    runs: list[Ran] = []
    for each in layouts:
        log(f"runs {each.name}, {each.ranks} process{'es' * (each.ranks > 1)}")
        runs.append(run_layout(each, script, plan, output, launcher))
        _tell_failure(runs[-1])
    found = {(a.layout.name, b.layout.name): _compared(a, b) for a, b in combinations(runs, 2)}
    _show([each.name for each in layouts], found)
    return max(verdict.code for verdict in found.values())


parity.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]


def _write_plan(output: Path, steps: list[int]) -> Path:
    path = output / "plan.json"
    with writing(path):
        output.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(plan_of(steps)))
    return path.absolute()


def _tell_failure(ran: Ran) -> None:
    if ran.code:
        lines = "".join(f"\n  {line}" for line in last_lines(ran))
        log(f"{ran.layout.name} ended with exit code {ran.code}; it printed last:{lines}", severity="error")


def _compared(a: Ran, b: Ran) -> Verdict:
    """Compare two layouts; one that did not run, or left nothing to compare, is no verdict."""
    failed = next((ran for ran in (a, b) if ran.code), None)
    if failed is not None:
        return Verdict(3, f"{failed.layout.name} ended with exit code {failed.code}")
    try:
        return compare_dumps(a.folder, b.folder)[1]
    except FormatError as error:
        return Verdict(3, f"{error}; does the training reach the step, and is its loop one that trainprobe knows?")
    except ProbeError as error:
        return Verdict(3, str(error))


def _show(names: list[str], found: dict[tuple[str, str], Verdict]) -> None:
    console = wide_console()
    heads = ("", *names[1:])
    table = plain_table(heads, wrapped=heads)
    for name in names[:-1]:
        cells = [VERDICTS[found[name, other].code] if (name, other) in found else "" for other in names[1:]]
        table.add_row(name, *cells)
    console.print(table)
    for (a, b), verdict in found.items():
        say(console, f"A {a}, B {b}: {verdict.sentence}")
