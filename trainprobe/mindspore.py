"""What scripts import from `msprobe.mindspore`: change the package's name and keep the rest (docs/migration.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainprobe.integrations.mindspore_front import MsprobeInitStep as MsprobeInitStep
    from trainprobe.integrations.mindspore_front import MsprobeStep as MsprobeStep
    from trainprobe.integrations.mindspore_front import PrecisionDebugger as PrecisionDebugger
    from trainprobe.integrations.mindspore_front import seed_all as seed_all

_NAMES = ("MsprobeInitStep", "MsprobeStep", "PrecisionDebugger", "seed_all")
_CALLBACK = "ProbeCallback of trainprobe.integrations.mindformers watches a training of a Model"
_INSTEAD = {
    "TrainerMon": f"{_CALLBACK}; the same JSON can be its plan",
    "save": "inside a graph no Python runs: in PyNative mode PrecisionDebugger.save records a value",
    "save_grad": "inside a graph no Python runs: in PyNative mode PrecisionDebugger.save records the gradient of a value too",
    "step": f"{_CALLBACK} and counts its steps",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module("trainprobe.integrations.mindspore_front"), name)
    if name in _INSTEAD:
        raise ImportError(f"trainprobe.mindspore has no {name}: {_INSTEAD[name]}")
    raise AttributeError(f"module 'trainprobe.mindspore' has no attribute {name!r}")
