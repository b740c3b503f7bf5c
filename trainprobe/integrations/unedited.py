"""Attaches to whichever framework a program imports, once it has imported it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.engine import at_start as python_start

VARIABLE = "TRAINPROBE_RUN"  # path of the plan, or "default"

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


def environment_for(plan: Path | None) -> dict[str, str]:
    """Return the environment in which a program, and each Python process that it starts, is watched."""
    return {**python_start.environment_for(__name__), VARIABLE: str(plan.absolute()) if plan else "default"}


def at_start() -> None:
    """Attach to each framework from the moment in which it is imported."""
    told = os.environ[VARIABLE]
    plan = None if told == "default" else told
    for name, file in FRAMEWORKS.items():
        if importlib.util.find_spec(f"trainprobe.integrations.{file}") is not None:
            ImportWatch().wait_for(name, partial(_attach, file, plan))


def _attach(file: str, plan: str | None, imported: Any) -> None:
    attach = getattr(importlib.import_module(f"trainprobe.integrations.{file}"), "attach_to_script", None)
    if attach is not None:
        attach(plan)


def called_from(packages: tuple[str, ...]) -> bool:
    """Tell whether a module of one of these packages is among the callers of the function that asks."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(packages):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
