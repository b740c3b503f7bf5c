"""trainprobe records, watches and compares the numbers inside a training run, and never changes them."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from trainprobe.engine import unobserved

__version__ = "0.2.0"

if TYPE_CHECKING:
    from trainprobe.again.conditions.compiled import compile_check as compile_check
    from trainprobe.config_check import ConfigChecker as ConfigChecker
    from trainprobe.engine.core.records import Place as Place
    from trainprobe.engine.plan.model import Plan as Plan
    from trainprobe.op_check.saved_calls import compare_for_single_op as compare_for_single_op
    from trainprobe.op_check.saved_calls import nan_inf_track_for_single_op as nan_inf_track_for_single_op
    from trainprobe.preflight import preflight as preflight
    from trainprobe.rollout import SingleComparator as SingleComparator
    from trainprobe.rollout import SingleSave as SingleSave
    from trainprobe.rollout.health import note_rollout as note_rollout
    from trainprobe.rollout.weights.prints import fingerprints as fingerprints
    from trainprobe.rollout.weights.sync import read_sync as read_sync
    from trainprobe.rollout.weights.sync import weight_sync as weight_sync
    from trainprobe.run.compare_with_cpu import CompareWithCPU as CompareWithCPU
    from trainprobe.run.compare_with_cpu import ModuleInfo as ModuleInfo
    from trainprobe.run.compare_with_cpu import NanInfTracker as NanInfTracker
    from trainprobe.run.compare_with_cpu import open_module_tracker as open_module_tracker
    from trainprobe.run.precision_debugger import PrecisionDebugger as PrecisionDebugger
    from trainprobe.watching import Probe as Probe
    from trainprobe.watching import watch as watch

# public name → the module that holds it; loaded on first use, so that `import trainprobe` stays far below 0.1 s
_PUBLIC = {
    "CompareWithCPU": "trainprobe.run.compare_with_cpu",
    "ConfigChecker": "trainprobe.config_check",
    "ModuleInfo": "trainprobe.run.compare_with_cpu",
    "NanInfTracker": "trainprobe.run.compare_with_cpu",
    "Place": "trainprobe.engine.core.records",
    "Plan": "trainprobe.engine.plan.model",
    "PrecisionDebugger": "trainprobe.run.precision_debugger",
    "Probe": "trainprobe.watching",
    "SingleComparator": "trainprobe.rollout",
    "SingleSave": "trainprobe.rollout",
    "compile_check": "trainprobe.again.conditions.compiled",
    "compare_for_single_op": "trainprobe.op_check.saved_calls",
    "fingerprints": "trainprobe.rollout.weights.prints",
    "nan_inf_track_for_single_op": "trainprobe.op_check.saved_calls",
    "note_rollout": "trainprobe.rollout.health",
    "open_module_tracker": "trainprobe.run.compare_with_cpu",
    "preflight": "trainprobe.preflight",
    "read_sync": "trainprobe.rollout.weights.sync",
    "watch": "trainprobe.watching",
    "weight_sync": "trainprobe.rollout.weights.sync",
}

__all__ = [
    "CompareWithCPU",
    "ConfigChecker",
    "ModuleInfo",
    "NanInfTracker",
    "Place",
    "Plan",
    "PrecisionDebugger",
    "Probe",
    "SingleComparator",
    "SingleSave",
    "__version__",
    "compare_for_single_op",
    "compile_check",
    "fingerprints",
    "nan_inf_track_for_single_op",
    "note_rollout",
    "open_module_tracker",
    "preflight",
    "read_sync",
    "watch",
    "weight_sync",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        try:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        except OSError as fault:
            if name != "watch" or not unobserved.lacks_descriptors(fault):
                raise
            return unobserved.watch
    if name == "GradComparator":  # of mindstudio-probe
        raise ImportError("trainprobe has no GradComparator: record both runs at level L0, then `trainprobe dump-compare A B`")
    if name == "ProbeCallback":
        return _callback()
    raise AttributeError(f"module 'trainprobe' has no attribute {name!r}")


def _callback() -> Any:
    """Return the callback of the one framework that is loaded; where several are, what says where each is once it is called.

    Raises ImportError where none is loaded.
    """
    loaded = [framework for framework in ("lightning", "transformers", "mindformers") if framework in sys.modules]
    if len(loaded) == 1:
        return importlib.import_module(f"trainprobe.integrations.{loaded[0]}").ProbeCallback
    places = ", ".join(f"trainprobe.integrations.{name}" for name in loaded or ("lightning", "transformers", "mindformers"))
    told = f"ProbeCallback is that of a framework: import it from one of {places}"
    if not loaded:
        raise ImportError(told)

    def refuse(*args: Any, **kwargs: Any) -> None:
        from trainprobe.errors import UsageError

        raise UsageError(told)

    return type("ProbeCallback", (), {"__init__": refuse})  # tools that look for classes by name may ask for it
