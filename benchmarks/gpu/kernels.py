"""The sweeps over a tensor: right against float64, and as fast as a copy on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.stats.partials import CHECKSUM, STATS, STD
from trainprobe.self_test.kernels import disagreements

WANTED = {"stats": STATS, "checksum": CHECKSUM, "stats and checksum": STATS | CHECKSUM, "stats and std": STATS | STD}
SHARE = 0.6  # of the device's copy bandwidth, for tensors of at least 4 MB
MANY = 500


def figures(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the agreement with float64, then a line for each dtype, size and what is wanted, then many small tensors."""
    for again in range(2):  # kernels are on trial in the first look and reduce in the second
        wrong, looked, worst = disagreements(machine.device, machine.rehearse)
        told = {"figure": "kernels", "look": again, "tensors": looked, "worst": worst, "wrong": wrong[:5], "met": not wrong}
        yield {**told, "refusals": [*TorchLibrary().faults()]}
    sizes = (1 << 12, 1 << 14) if machine.rehearse else (1 << 12, 1 << 16, 1 << 22, 1 << 26, 1 << 28)  # bytes
    for name in ("bfloat16", "float32", "float16", "float8_e4m3fn")[: 2 if machine.rehearse else None]:
        dtype = getattr(torch, name)
        for size in sizes:
            t = torch.randn(size // dtype.itemsize, device=machine.device).to(dtype)
            copy = _rate(machine, 2 * size, _copies(t))
            for wanted, flags in WANTED.items():
                rate = _rate(machine, size, _sweeps(t, flags))
                line = {"dtype": name, "bytes": size, "wanted": wanted, "GB/s": round(rate, 1), "copy GB/s": round(copy, 1)}
                judged = size >= 1 << 22 and wanted in ("stats", "checksum")
                yield {"figure": "sweep", **line, "met": rate >= SHARE * copy if judged else None}
    for wanted, flags in WANTED.items():
        yield {"figure": "many small", "wanted": wanted, "tensors": MANY, **_many(machine, flags)}


def _copies(t: torch.Tensor) -> Callable[[int], None]:
    target = torch.empty_like(t)

    def run(times: int) -> None:
        for _ in range(times):
            target.copy_(t)

    return run


def _sweeps(t: torch.Tensor, flags: int) -> Callable[[int], None]:
    library = TorchLibrary()

    def run(times: int) -> None:
        rows = library.stats_rows(flags)
        for _ in range(times):
            rows.add(t)

    return run


def _rate(machine: Machine, size: int, run: Callable[[int], None]) -> float:
    """Return GB/s of `size` bytes a time: the best of three."""
    times = 3 if machine.rehearse else max(3, min(200, (1 << 31) // size))
    run(3)
    best = float("inf")
    for _ in range(3):
        machine.wait()
        begun = time.perf_counter()
        run(times)
        machine.wait()
        best = min(best, time.perf_counter() - begun)
    return size * times / best / 1e9


def _many(machine: Machine, flags: int) -> dict[str, float]:
    """Return microseconds a tensor of 4 kB: the host's until it may go on, and all until the device is done."""
    tensors = [torch.randn(1024, device=machine.device) for _ in range(MANY)]
    library = TorchLibrary()
    told: list[tuple[float, float]] = []
    for _ in range(4):
        rows = library.stats_rows(flags)
        machine.wait()
        begun = time.perf_counter()
        for t in tensors:
            rows.add(t)
        host = time.perf_counter() - begun
        machine.wait()
        told.append((host, time.perf_counter() - begun))
    host, whole = min(told)
    return {"host_us": round(1e6 * host / MANY, 2), "whole_us": round(1e6 * whole / MANY, 2)}
