"""`trainprobe preflight train.py`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from trainprobe.comparison.ci_formats import Case, Github, Junit, case_of, tell
from trainprobe.comparison.files import write_json
from trainprobe.comparison.terminal import say
from trainprobe.engine.at_start.door import VARIABLE as DOOR
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.log_lines import say as log
from trainprobe.errors import ProbeError, UsageError
from trainprobe.preflight.examine import checked, preflight
from trainprobe.preflight.report import BROKEN, Report
from trainprobe.preflight.script.first_update import FirstUpdate, joined
from trainprobe.preflight.script.frameworks import Training


def preflight_script(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="The script and what it is given.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After which no further property begins.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="A property to test; may be given again.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A property to leave out; may be given again.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the answer (docs/preflight.schema.json).")] = None,
    junit: Junit = None,
    github: Github = False,
) -> int:
    """Run a script up to its first update, test its loss and model on that batch, print what holds, and end the script there.

    Nothing is trained, and nothing behind the first update runs: no checkpoint, no `finally`. Exit code: 0 nothing is broken,
    2 something is, 3 nothing could be tested.
    """
    script = list(words or [])
    if script and script[0] == "--":
        script.pop(0)
    if not script:
        raise UsageError("nothing to run: give the script, as in `trainprobe preflight train.py --lr 3e-4`")
    path = Path(script[0])
    if not path.is_file():
        raise UsageError(f"{path} is no file: give the script, as in `trainprobe preflight train.py --lr 3e-4`")
    checked(only or (), skip or ())

    options = {"only": only or (), "skip": skip or (), "seconds": seconds}

    def end(learnt: Callable[[], tuple[Training, list[Any]]]) -> None:
        """Test, print, and leave the process at once: what a script does at its end belongs to a training."""
        answer = attempt(lambda: _told(_tested(*learnt(), options), json, junit, github), otherwise=_untested)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(answer)

    os.environ[DOOR] = "off"  # a script that is watched writes no run
    sys.argv = script
    sys.path.insert(0, str(path.resolve().parent))
    with FirstUpdate(end) as first:
        ended = attempt(lambda: _run(path), otherwise=_told_fault)
    log(f"{path} {ended} without an update of an optimizer of torch{first.remark}: nothing was tested", severity="error")
    return 3


def _run(path: Path) -> str:
    with suppress(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    return "ended"


def _told_fault(fault: Exception) -> str:
    """Show what the script itself raised."""
    traceback.print_exception(fault)
    return "failed"


def _untested(fault: Exception) -> int:
    log(str(fault) if isinstance(fault, ProbeError) else f"the step cannot be run again: {fault_text(fault)}", severity="error")
    return 3


preflight_script.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]


def _tested(training: Training, optimizers: list[Any], options: dict[str, Any]) -> Report:
    """Test the micro-batches as one batch; the first alone where the loss cannot be made of all."""
    micros = training.micros
    test = partial(preflight, training.loss, training.model, optimizer=optimizers, **options)
    if len(micros) == 1:
        return test(micros[0], step=training.step)
    whole = attempt(lambda: test(joined(micros), step=training.step, micro_batches=len(micros)), otherwise=fault_text)
    if not isinstance(whole, str):
        return whole
    log(
        f"the loss of {len(micros)} micro-batches in one cannot be made ({whole}): the first of them is tested",
        severity="warning",
    )
    return test(micros[0])


def _told(report: Report, json: Path | None, junit: Path | None, github: bool) -> int:
    console = Console()
    for line in report.lines:
        say(console, str(line), line.colour)
    verdict = report.verdict
    say(console, verdict.sentence, verdict.colours[verdict.code])
    if json is not None:
        write_json(report.as_json(), json)
    cases = [Case(line.name, "failure" if line.status == BROKEN else "passed", str(line)) for line in report.lines]
    tell("preflight", cases if verdict.code < 3 else [case_of(sys.argv[0], 3, verdict.sentence)], junit, github)
    return verdict.code
