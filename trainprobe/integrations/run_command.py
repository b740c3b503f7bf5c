"""`trainprobe run PLAN -- script.py ARGS`: run a training script under a plan, with no edit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainprobe.engine.core.log_lines import say
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import UsageError
from trainprobe.integrations.auto_attach import AttachedRun, environment_for
from trainprobe.integrations.output_folder import free_folder

OPTIONS = ("--output", "-o", "--plan")
NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES")


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PLAN] -- COMMAND",
        help="Plan (YAML or JSON; without one the default plan), then the script or command.",
        show_default=False,
    ),
]
PlanOption = Annotated[str | None, typer.Option(help="The plan, in place of the first argument.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write to, in place of the plan's.")]


def run(
    context: typer.Context,
    words: Words = None,
    plan: PlanOption = None,
    output: OutputOption = None,
) -> None:
    """Run `script.py ARGS`, or any command that starts Python such as `torchrun … script.py`, watched as the plan says.

    The program takes the place of this process, so signals and exit codes are its own. Processes that it starts are watched
    too. If the folder holds an earlier run, a new one is written next to it (`probe_out.2`), and a training that is resumed
    from a checkpoint continues in the earlier one; a plan that says `on_existing: continue` or `replace` is followed.
    """
    left = list(words or [])
    if plan is None and not _behind_dashes(context.obj or [], left) and _begins_with_plan(left):
        plan, *left = left
    while len(left) > 1 and left[0] in OPTIONS:  # behind the plan
        name, value, *left = left
        plan, output = (value, output) if name == "--plan" else (plan, Path(value))
    if left and left[0] == "--":
        left.pop(0)
    if not left:
        raise UsageError(
            "nothing to run: give the script and its arguments behind `--`, as in `trainprobe run plan.yaml -- train.py`"
        )
    if left[0].startswith("-") and left[0] != "-m":
        raise UsageError(f"{left[0]} is no option of `trainprobe run`; those of the program stand behind it, and behind `--`")
    path = None if plan in (None, "default") else Path(plan)
    chosen = load_plan(path, **({} if output is None else {"output": output}))
    started = [sys.executable, *left] if left[0].endswith(".py") or left[0] == "-m" else left
    try:
        os.execvpe(started[0], started, environment_for(_run(path, chosen, left)))
    except OSError as error:
        raise UsageError(f"{started[0]!r} cannot be run: {error.strerror or error}") from None


def _behind_dashes(arguments: list[str], words: list[str]) -> bool:
    """Tell whether these last words of the command line stand behind a `--`, which is not among them."""
    return arguments[: len(arguments) - len(words)][-1:] == ["--"]


def _begins_with_plan(words: list[str]) -> bool:
    """Tell whether the first word is a plan: `default`, a name of a YAML or JSON file, or what stands before a `--`."""
    first, *behind = words or [""]
    while behind[:1] and behind[0] in OPTIONS:
        behind = behind[2:]
    named = first == "default" or first.lower().endswith((".yaml", ".yml", ".json"))
    return named or (behind[:1] == ["--"] and not first.startswith("-") and not first.endswith(".py"))


def _run(path: Path | None, plan: Plan, command: list[str]) -> AttachedRun:
    """Return where this run is written; print a line if an earlier run lies there."""
    folder = plan.output
    if plan.on_existing != "beside" or _has_several_nodes(command):
        return AttachedRun(path, folder, decided=False)
    free, earlier = free_folder(folder)
    if earlier is not None:
        say(f"{earlier} holds an earlier run: this one is written to {free}, unless it resumes that one from a checkpoint")
    return AttachedRun(path, free, earlier)


def _has_several_nodes(command: list[str]) -> bool:
    """Return whether other machines start this run too: they could not agree on a new folder."""
    after = [b for a, b in zip(command, [*command[1:], ""], strict=True) if a in ("--nnodes", "--num_machines")]
    equals = [word.partition("=")[2] for word in command if word.startswith(("--nnodes=", "--num_machines="))]
    counts = [*after, *equals, *(os.environ.get(name, "1") for name in NODES)]
    return any(number not in ("1", "1:1") for number in counts)


run.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]
