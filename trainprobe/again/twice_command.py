"""`trainprobe again --step N -- train.py`: one step of a script twice on this machine, before its optimizer moves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from trainprobe.again.script_runs import run_script, script_of
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.engine.storage.dumps.layout import find_dumps
from trainprobe.errors import ProbeError


def again(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The script; let it end behind the step.", show_default=False),
    ] = None,
    step: Annotated[int, typer.Option(help="The step, as the training counts.", min=0)] = 0,
    ranks: Annotated[int, typer.Option(help="Processes; several are started by torchrun.", min=1)] = 1,
    json: Json = None,
    html: Html = None,
) -> int:
    """Run a script, and forward and backward of one of its steps twice: is the hardware or an op unsteady?

    Exit code: 0 the same bits, 2 not deterministic or a fault of the hardware, 3 the step was not run again.
    """
    script = script_of(words, "again --step 100 -- train.py --steps 101")
    with tempfile.TemporaryDirectory() as folder:
        ran = run_script(
            script, Path(folder) / "run", [step], ranks=ranks, audit={"repeat": max(step, 1), "every": max(step, 1)}
        )
        if ran.code:
            raise ProbeError(f"the script {ran.failure}")
        verdict = _verdict(ran.folder, step)
    return answered(verdict, "again", " ".join(script), json, html)


again.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]


def _verdict(folder: Path, step: int) -> Verdict:
    """Return what the repeat of a step came to on all ranks of a run."""
    ranks = find_dumps(folder).get(step, {})
    found = [f for f in read_findings(folder) if f.rule == "repeat"]  # step 0 runs twice too, and one fault is told once
    bad = sorted((f for f in found if f.severity != "info"), key=lambda f: f.severity != "error")
    if bad:
        return Verdict(2, bad[0].message, [*filter(None, [bad[0].next]), *(f.message for f in bad[1:])])
    if not ranks or found:
        why = found[0].message if found else f"step {step} was not reached: which steps does the script count?"
        return Verdict(3, f"not comparable: {why}")
    text = f"forward and backward of step {step} ran twice on {counted(len(ranks), 'rank')}, with the same bits"
    return Verdict(0, f"identical: {text}")
