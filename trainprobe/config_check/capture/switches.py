"""The switches of torch that decide which kernels run and whether results repeat, as they are while the model is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from trainprobe.config_check.capture.plain_values import plain
from trainprobe.config_check.capture.switch_table import switches

_ABSENT = object()


def read_switches(device: str = "cpu") -> dict[str, Any]:
    """Return switch → value of those that this torch has. device: kind of the device on which the model computes."""
    found: dict[str, Any] = {}
    for name, row in switches().items():
        value = _ask(row["read"]) if "read" in row else _OWN[name](device)
        if value is not _ABSENT:
            found[name] = _value(value)
    return found


def device_of(models: list[Any]) -> str:
    """Return the kind of device on which the first parameter lies, `cpu` where there is none."""
    return next((p.device.type for model in models for p in model.parameters()), "cpu")


def _ask(path: str) -> Any:
    """Return what stands at a path below torch; two ways to set the same precision forbid each other's reading."""
    try:
        found = reduce(getattr, path.split("."), torch)
        return found() if callable(found) else found
    except (AttributeError, RuntimeError):
        return _ABSENT


def _value(value: Any) -> Any:
    """Return torch's own kinds of values by their names."""
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    return getattr(value, "name", None) or plain(value)


def _autocast(device: str) -> Any:
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else "off"
    except RuntimeError:  # a device without autocast
        return _ABSENT


def _flush_denormal(_: str) -> bool:
    """Tell by a product on this thread; torch has no function that says so."""
    smallest, one = 5e-324, float(len("1"))
    return smallest * one == 0.0


_OWN: dict[str, Callable[[str], Any]] = {
    "autocast": _autocast,
    "flush_denormal": _flush_denormal,
    "python_optimize": lambda _: sys.flags.optimize,
}
