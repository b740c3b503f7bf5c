"""How much memory a device still has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.storage.safe_files import open_to_read

_GROUP = Path("/sys/fs/cgroup")


def free_memory(device: Any) -> float:
    """Return the bytes that can be had on a device of torch, of the host within the limit of its group; else infinity."""
    return attempt(lambda: _of_host() if device.type == "cpu" else _of_device(device), otherwise=lambda _: float("inf"))


def _of_host() -> float:
    lines = (line.split() for line in _told(Path("/proc/meminfo")).splitlines())
    free = next(1024.0 * int(words[1]) for words in lines if words[0] == "MemAvailable:")
    if not (_GROUP / "memory.max").is_file() or (limit := _told(_GROUP / "memory.max").strip()) == "max":
        return free
    held = dict(line.split() for line in _told(_GROUP / "memory.stat").splitlines())
    used = int(_told(_GROUP / "memory.current")) - int(held.get("inactive_file", 0))  # the kernel drops what it read of files
    return min(free, float(int(limit) - used))


def _told(path: Path) -> str:
    with open_to_read(path) as file:  # the kernel says a size of 0
        return file.read(1 << 16).decode()


def _of_device(device: Any) -> float:
    kind: Any = sys.modules[f"torch.{device.type}"]
    return float(kind.mem_get_info(device)[0] + kind.memory_reserved(device) - kind.memory_allocated(device))
