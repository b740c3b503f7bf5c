"""`trainprobe compile-check -- train.py`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from trainprobe.again.compiled import compile_check
from trainprobe.again.script_runs import script_of
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.engine.capture.gathering import ranks
from trainprobe.errors import UsageError
from trainprobe.preflight.script.command import Learnt, at_first_update


def compile_check_script(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The script and what it is given.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After which the search for the place ends.")] = 600.0,
    json: Json = None,
    html: Html = None,
) -> int:
    """Run a script up to its first update, compare its step eager and compiled by Inductor, and end the script there.

    Nothing is trained. Exit code: 0 the same bits, 1 within rounding, 2 another step: the layer of compilation, the module and
    the operator are named, 3 not comparable.
    """
    script = script_of(words, "compile-check -- train.py --lr 3e-4")

    def answer(learnt: Learnt) -> int:
        if ranks() > 1:
            raise UsageError("compile-check runs the step of one rank: start the script without a launcher")
        training, _ = learnt()
        verdict = compile_check(training.loss, training.model, training.micros[0], seconds=seconds)
        return answered(verdict, "compile-check", script[0], json, html)

    with torch.compiler.set_stance("force_eager"):  # the step is learnt from what the script calls
        return at_first_update(script, answer)


compile_check_script.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]
