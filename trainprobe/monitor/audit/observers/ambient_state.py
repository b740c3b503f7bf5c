"""What holds for a whole thread or process and changes what the same code computes: modes, the default dtype, precision."""

from __future__ import annotations

from typing import Any

import torch

from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.relations.ambient_state import Ambient


class AmbientState(Observer):
    """Looks where the first update of a step begins."""

    essential = True

    def forget(self) -> None:
        """Forget the last step."""
        self._found: dict[str, str] = {}

    def steps(self, optimizer: Any) -> None:
        """Look once."""
        self._found = self._found or ambient_state(optimizer)

    def facts(self, step_data: StepData) -> Ambient:
        """Return what held."""
        return Ambient(self._found)


def ambient_state(optimizer: Any) -> dict[str, str]:
    """Return these by name, in words; autocast is that of the device on which an optimizer's first parameter is."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    return {
        "autocast": _autocast("cpu" if first is None else first.device.type),
        "grad mode": _on(torch.is_grad_enabled()),
        "inference mode": _on(torch.is_inference_mode_enabled()),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic algorithms": _on(torch.are_deterministic_algorithms_enabled()),
        "precision of float32 matrix products": torch.get_float32_matmul_precision(),
    }


def _autocast(device: str) -> str:
    try:
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else "off"
    except RuntimeError:  # a device that has no autocast
        return "off"


def _on(flag: bool) -> str:
    return "on" if flag else "off"
