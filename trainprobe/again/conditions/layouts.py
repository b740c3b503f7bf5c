"""Other layouts: `trainprobe parity` runs a script on another number of processes, with other arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

from trainprobe.again.script_runs import TORCHRUN, Ran, Script, of_a_script, run_script, script_of
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.verdict import NAMES, Verdict
from trainprobe.dump_compare.command import compare_dumps
from trainprobe.engine.core.log_lines import say as log
from trainprobe.engine.core.words import counted
from trainprobe.errors import FormatError, ProbeError, UsageError

_LAYOUT = re.compile(r"(?P<name>[\w.-]+)=(?P<ranks>\d+)(?:\s+(?P<arguments>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ScriptLayout:
    """One way to run the script. name: of its folder. ranks: processes. arguments: of the script, in this layout alone."""

    name: str
    ranks: int
    arguments: tuple[str, ...] = ()


def read_layouts(texts: Sequence[str]) -> list[ScriptLayout]:
    """Return the layouts that `NAME=RANKS ARGUMENTS` tell. Raises UsageError."""
    found: list[ScriptLayout] = []
    for text in texts:
        match = _LAYOUT.fullmatch(text.strip())
        if match is None or match["ranks"] == "0":
            raise UsageError(f"--layout {text!r} cannot be read: write NAME=RANKS ARGUMENTS, such as 'tp2=2 --tp 2'")
        try:
            arguments = tuple(shlex.split(match["arguments"] or ""))
        except ValueError as error:
            raise UsageError(f"--layout {text!r}: its arguments cannot be read: {error}") from None
        found.append(ScriptLayout(match["name"], int(match["ranks"]), arguments))
    names = [layout.name for layout in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--layout {twice}: two layouts have this name")
    if len(found) < 2:
        raise UsageError("parity compares layouts: give --layout at least twice")
    return found


@of_a_script
def parity(
    words: Script = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", "-l", help="NAME=RANKS ARGUMENTS: processes, and what the script is given; at least twice."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the dumps.")] = Path("parity_out"),
    step: Annotated[
        list[int] | None, typer.Option(help="Step to compare, as the training counts; may be given again. [0]")
    ] = None,
    launcher: Annotated[str, typer.Option(help="Command that starts the processes; {ranks} is their number.")] = TORCHRUN,
    json: Json = None,
    html: Html = None,
) -> int:
    """Run one script in several layouts, and compare a step of each with that of all others.

    Give the script equal weights, samples and a run that ends after the step. Exit code: the worst of all pairs, as of
    `dump-compare`: 0 identical, 1 within rounding, 2 differ, 3 not comparable or a layout did not run.
    """
    script = script_of(words, "parity -l 'one=1' -l 'tp2=2 --tp 2' -- train.py")
    runs: dict[str, Ran] = {}
    for each in read_layouts(layout or []):
        log(f"runs {each.name} on {counted(each.ranks, 'rank')}")
        asked = [*script, *each.arguments]
        ran = runs[each.name] = run_script(asked, output / each.name, step or [0], ranks=each.ranks, launcher=launcher)
        if ran.code:
            log(f"{each.name} {ran.failure}", severity="error")
    found = {(a, b): _compared(runs[a], runs[b]) for a, b in combinations(runs, 2)}
    told = {(a, b): f"A {a}, B {b}: {NAMES[verdict.code]}: {verdict.sentence}" for (a, b), verdict in found.items()}
    worst = max(found, key=lambda pair: found[pair].code)
    verdict = Verdict(found[worst].code, told.pop(worst), list(told.values()))
    return answered(verdict, "parity", " ".join(script), json, html)


def _compared(a: Ran, b: Ran) -> Verdict:
    """Compare two layouts; one that did not run, or left nothing to compare, is no verdict."""
    failed = next((ran for ran in (a, b) if ran.code), None)
    if failed is not None:
        return Verdict(3, f"{failed.folder.name} ended with exit code {failed.code}")
    try:
        return compare_dumps(a.folder, b.folder)[1]
    except FormatError as error:
        return Verdict(3, f"{error}; does the training reach the step, and is its loop one that trainprobe knows?")
    except ProbeError as error:
        return Verdict(3, str(error))
