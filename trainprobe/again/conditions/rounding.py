"""Another rounding: `trainprobe floor` measures what rounding alone does to a training."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from trainprobe.engine import at_start as python_start
from trainprobe.engine.core.log_lines import say
from trainprobe.errors import UsageError, did_you_mean
from trainprobe.integrations.run_command import OutputOption, PlanOption, Words, run

WAYS = ("repeat", "threads", "perturb")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def floor(
    context: typer.Context,
    words: Words = None,
    way: Annotated[
        str, typer.Option(help="repeat: as it is. threads: another number of threads. perturb: weights off by their last bit.")
    ] = "perturb",
    plan: PlanOption = None,
    output: OutputOption = None,
) -> None:
    """Run a training as `trainprobe run` does, but rounded otherwise: its dump is the `--floor` of `dump-compare`.

    `perturb` moves each element of each weight to a neighbouring number, up or down by chance, when the optimizer is made: this
    run is not the training itself. It knows optimizers of torch and MindSpore; weights loaded after that are as they were.
    """
    if way not in WAYS:
        raise UsageError(f"--way {way!r} is none of {', '.join(WAYS)}{did_you_mean(way, list(WAYS))}")
    if way == "threads":
        other = "2" if os.environ.get("OMP_NUM_THREADS") == "1" or os.cpu_count() == 1 else "1"
        os.environ |= dict.fromkeys(_THREADS, other)
        say(f"this run has {other} thread{'s' * (other != '1')}, unless the program sets their number")
    elif way == "perturb":
        os.environ |= python_start.environment_for("trainprobe.integrations.perturbed_start")
    run(context, words, plan, output)


floor.context_settings = run.context_settings  # type: ignore[attr-defined]
