"""`trainprobe run PLAN -- script.py ARGS`: run a training script under a plan, with no edit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainprobe.engine.plan_loading import load_plan
from trainprobe.errors import UsageError
from trainprobe.integrations.unedited import environment_for


def run(
    plan: Annotated[str, typer.Argument(help="Plan that the run is watched under (YAML or JSON), or `default`.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The script or command.", show_default=False)
    ] = None,
) -> None:
    """Run `script.py ARGS`, or any command that starts Python such as `torchrun … script.py`, watched as the plan says.

    The program takes the place of this process, so signals and exit codes are its own. Processes that it starts are watched
    too.
    """
    words = [word for i, word in enumerate(command or []) if word != "--" or i]
    if not words:
        raise UsageError(
            "nothing to run: give the script and its arguments behind `--`, as in `trainprobe run plan.yaml -- train.py`"
        )
    if plan != "default":
        load_plan(plan)
    started = [sys.executable, *words] if words[0].endswith(".py") or words[0] == "-m" else words
    try:
        os.execvpe(started[0], started, environment_for(Path(plan) if plan != "default" else None))
    except OSError as error:
        raise UsageError(f"{started[0]!r} cannot be run: {error.strerror or error}") from None


run.context_settings = {"ignore_unknown_options": True}  # type: ignore[attr-defined]
