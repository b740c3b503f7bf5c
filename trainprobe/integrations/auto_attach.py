"""Attaches to whichever framework a program imports, once it has imported it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.engine import at_start as python_start
from trainprobe.engine.at_start.door import VARIABLE as DOOR
from trainprobe.engine.core.log_lines import say
from trainprobe.errors import PlanError
from trainprobe.integrations import expected_stops

if TYPE_CHECKING:
    from trainprobe.engine.plan.model import Plan

VARIABLE = "TRAINPROBE_RUN"  # path of the plan, or "default"
OUTPUT = "TRAINPROBE_RUN_OUTPUT"  # folder that this run is written to
EARLIER = "TRAINPROBE_RUN_EARLIER"  # folder of the earlier run in the same output; empty if there is none, unset if not known

# what a program imports → file of trainprobe.integrations that has attach_to_script(plan); it is called once that is imported
FRAMEWORKS = {
    "torch": "torch_loop",
    "lightning.pytorch.trainer.trainer": "lightning",
    "pytorch_lightning.trainer.trainer": "lightning",
    "transformers.trainer": "transformers",
    "deepspeed": "deepspeed",
    "megatron.training.training": "megatron",
    "mindspore": "mindformers",
    "mindformers.pynative.trainer.trainer": "mindformers",
}


@dataclass(frozen=True, slots=True)
class AttachedRun:
    """What a program is watched under. plan: a file, or None for the default plan. output: where it is written.

    earlier: the newest run in a folder of that name, which a training that is resumed goes on with. decided: that the folder is
    free; else the processes find out.
    """

    plan: Path | None
    output: Path
    earlier: Path | None = None
    decided: bool = True


def environment_for(run: AttachedRun) -> dict[str, str]:
    """Return the environment in which a program, and each Python process that it starts, is watched."""
    inherited = {name: value for name, value in python_start.environment_for(__name__).items() if name != EARLIER}
    return {
        **inherited,
        VARIABLE: str(run.plan.absolute()) if run.plan else "default",
        OUTPUT: str(run.output),
        **({EARLIER: str(run.earlier or "")} if run.decided else {}),
    }


def at_start() -> None:
    """Attach to each framework from the moment in which it is imported."""
    expected_stops.watch()
    for name, file in FRAMEWORKS.items():
        if importlib.util.find_spec(f"trainprobe.integrations.{file}") is not None:
            ImportWatch().wait_for(name, partial(_attach, file))


def _attach(file: str, imported: Any) -> None:
    attach = getattr(importlib.import_module(f"trainprobe.integrations.{file}"), "attach_to_script", None)
    if attach is not None:
        try:
            plan = _plan("mindspore" if file == "mindformers" else "pytorch")
        except PlanError as error:  # `trainprobe run` has read the plan before
            say(f"{DOOR}={os.environ.get(DOOR)}: this process is not watched: {error}", severity="error")
        else:
            attach(plan)


def _plan(framework: str) -> Plan:
    """Return the plan of this run, as a framework has it. Raises PlanError."""
    from trainprobe.engine.plan.loading import load_plan

    plan_file, output = os.environ[VARIABLE], os.environ.get(OUTPUT)
    return load_plan(None if plan_file == "default" else plan_file, framework, **({} if output is None else {"output": output}))


def called_from(packages: tuple[str, ...]) -> bool:
    """Tell whether a module of one of these packages is among the callers of the function that asks."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(packages):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
