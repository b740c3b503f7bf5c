"""`trainprobe preflight train.py`."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from trainprobe.comparison.ci_formats import Github, Junit, PipelineCase, case_of, tell
from trainprobe.comparison.files import write_json
from trainprobe.comparison.terminal import say
from trainprobe.engine.at_start.door import VARIABLE as DOOR
from trainprobe.engine.capture.gathering import ranks
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.log_lines import say as log
from trainprobe.engine.storage.safe_files import read_text
from trainprobe.errors import ProbeError, UsageError
from trainprobe.integrations.first_update import FirstUpdate
from trainprobe.preflight.examine import checked
from trainprobe.preflight.page import write_page
from trainprobe.preflight.report import BROKEN, COLOURS, Report
from trainprobe.preflight.script.ranks import together
from trainprobe.preflight.training import Training, tested

ANSWER = "TRAINPROBE_PREFLIGHT_ANSWER"  # file for the exit code, under a launcher
UNREAD = 141
Learnt = Callable[[], tuple[Training, list[Any]]]


def preflight_script(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="The script and what it is given.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After which no further property begins.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="A property to test; may be given again.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A property to leave out; may be given again.")] = None,
    overfit: Annotated[bool, typer.Option(help="Train on the batch for 20 steps, which are undone.")] = False,
    html: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for a page with charts of what changes with what.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the answer (docs/preflight.schema.json).")] = None,
    junit: Junit = None,
    github: Github = False,
) -> int:
    """Run a script up to its first update, test its loss and model on that batch, print what holds, and end the script there.

    Nothing is trained, and nothing behind the first update runs: no checkpoint, no `finally`. Exit code: 0 nothing is broken,
    2 something is, 3 nothing could be tested.
    """
    script = [word for i, word in enumerate(words or []) if i or word != "--"]
    if not script:
        raise UsageError("nothing to run: give the script, as in `trainprobe preflight train.py --lr 3e-4`")
    if script[0].startswith("-") and script[0] != "-m":
        raise UsageError(f"{script[0]} is no option of `trainprobe preflight`; those of the script stand behind it")
    options = {"only": only or (), "skip": skip or (), "seconds": seconds, "overfit": overfit, "charts": html is not None}
    checked(only or (), skip or ())
    first = next((i for i, word in enumerate(script) if word.endswith(".py") and Path(word).is_file()), 0)
    if first:
        return _launched(script[:first], script[first:], sys.argv[1 : len(sys.argv) - len(words or [])])
    told = partial(_told, html=html, json=json, junit=junit, github=github)
    return at_first_update(script, lambda learnt: _answer(learnt, options, told))


def at_first_update(script: list[str], answer: Callable[[Learnt], int]) -> int:
    """Run a script and, before its first update, `answer(learnt)`; then end the process at once, with the code that it returns.

    What a script does at its end belongs to a training. `-m` and a module stand for a script, as they do for Python. Returns 3
    where no optimizer of torch stepped. Raises UsageError where the first word is no file.
    """
    script = script[1:] if (is_module := script[0] == "-m" and len(script) > 1) else script
    path = Path(script[0])
    if not is_module and not path.is_file():
        raise UsageError(f"{path} is no file: give the script and its arguments, as in `-- train.py --lr 3e-4`")

    def end(learnt: Learnt) -> None:
        code = attempt(lambda: answer(learnt), otherwise=_untested)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_left(code))

    os.environ[DOOR] = "off"  # a script that is watched writes no run
    warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")  # ours
    sys.argv = script
    sys.path.insert(0, str(Path.cwd() if is_module else path.resolve().parent))
    with FirstUpdate(end) as first:
        ended = attempt(lambda: _run(script[0], is_module), otherwise=_told_fault)
    seen = f" ({len(first.micros)} backward passes were seen)" if first.micros else ""
    log(f"{path} {ended} without an update of an optimizer of torch{seen}: nothing was tested", severity="error")
    return _left(3)


def _launched(launcher: list[str], script: list[str], told: list[str]) -> int:
    """Run this command on each rank that a launcher (torchrun, accelerate launch, deepspeed) starts; return rank 0's answer.

    told: the command and its options.
    """
    module = ["--module" if Path(launcher[0]).name == "deepspeed" else "-m", "trainprobe"]
    told = told[:-1] if told[-1:] == ["--"] else told
    with TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        command = [*launcher, *module, *told, "--", *script]
        ended = attempt(
            lambda: subprocess.run(command, env={**os.environ, ANSWER: str(answer)}).returncode, otherwise=fault_text
        )
        if answer.is_file():
            return int(read_text(answer))
    log(f"{launcher[0]} ended ({ended}) before anything was tested", severity="error")
    return 3


def _left(answer: int) -> int:
    """Return the exit code; 0 under a launcher that was told to start this, as it takes any other for a crash."""
    if ANSWER not in os.environ:
        return answer
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ[ANSWER]).write_text(str(answer))
    return 0


def _run(script: str, is_module: bool) -> str:
    with suppress(SystemExit):
        runpy.run_module(script, run_name="__main__", alter_sys=True) if is_module else runpy.run_path(
            script, run_name="__main__"
        )
    return "ended"


def _told_fault(fault: Exception) -> str:
    """Show what the script itself raised, from its own lines on."""
    below, ours = fault.__traceback__, (str(Path(__file__).parents[2]), "<frozen runpy>")
    while below is not None and below.tb_next is not None and below.tb_frame.f_code.co_filename.startswith(ours):
        below = below.tb_next
    traceback.print_exception(fault.with_traceback(below))
    return "failed"


def _untested(fault: Exception) -> int:
    if isinstance(fault, BrokenPipeError):  # nobody reads what is printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return UNREAD
    log(str(fault) if isinstance(fault, ProbeError) else f"the step cannot be run again: {fault_text(fault)}", severity="error")
    return 3


preflight_script.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]


def _answer(learnt: Learnt, options: dict[str, Any], told: Callable[[Report], int]) -> int:
    if ranks() == 1:
        return told(tested(*learnt(), **options))
    found = attempt(learnt, otherwise=lambda fault: (fault, []))
    return together(found[0], lambda training: told(tested(training, found[1], **options)))


def _told(report: Report, html: Path | None, json: Path | None, junit: Path | None, github: bool) -> int:
    console = Console()
    for line in report.lines:
        say(console, str(line), COLOURS[line.status])
    verdict = report.verdict
    say(console, verdict.sentence, verdict.colours[verdict.code])
    if html is not None:
        write_page(report, sys.argv[0], html)
    if json is not None:
        write_json(report.as_json(), json)
    cases = [PipelineCase(line.name, "failure" if line.status == BROKEN else "passed", str(line)) for line in report.lines]
    tell("preflight", cases if verdict.code < 3 else [case_of(sys.argv[0], 3, verdict.sentence)], junit, github)
    return verdict.code
