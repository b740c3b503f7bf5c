"""The sweeps over a tensor: right against float64, and as fast as a copy on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.arrays.triton_rows import TAKEN, trust_in
from trainprobe.engine.stats.partials import CHECKSUM, STATS, STD
from trainprobe.self_test.kernels import disagreements

WANTED = {"stats": STATS, "checksum": CHECKSUM, "stats and checksum": STATS | CHECKSUM, "stats and std": STATS | STD}
SHARE = 0.6  # of the device's copy bandwidth, for tensors of at least 4 MB that are reduced together
MANY = 500


def figures(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the agreement with float64, then a line for each wish, dtype and size, and many small tensors after two wishes."""
    for again in range(2):  # kernels are on trial in the first look and reduce in the second
        wrong, looked, worst = disagreements(machine.device, machine.rehearse)
        told = {"figure": "kernels", "look": again, "tensors": looked, "worst": worst, "wrong": wrong[:5], "met": not wrong}
        yield {**told, "refusals": [*TorchLibrary().faults()]}
    names = ("bfloat16", "float32", "float16", "float8_e4m3fn")[: 2 if machine.rehearse else None]
    for wishes in (("stats", "checksum"), ("stats and checksum", "stats and std")):
        for name in names:
            for wanted in wishes:
                yield from _of(machine, getattr(torch, name), wanted, WANTED[wanted])
        for wanted in wishes:
            yield {"figure": "many small", "wanted": wanted, "tensors": MANY, **_many(machine, WANTED[wanted])}


def _of(machine: Machine, dtype: torch.dtype, wanted: str, flags: int) -> Iterator[dict[str, Any]]:
    """Yield a line a size: GB/s of a tensor reduced alone, of some reduced together, and of a copy, which reads and writes."""
    begun = time.perf_counter()
    for _ in range(2):  # the trial, whose rows have to reach the host, and what is compiled when the kernels first reduce
        rows = TorchLibrary().stats_rows(flags)
        rows.add(torch.ones(1000, device=machine.device).to(dtype))
        rows.drain()
    first = round(time.perf_counter() - begun, 2)
    path = "Triton" if trust_in(torch.device(machine.device, 0)).proven((dtype, flags & TAKEN)) else "others"
    for size in (1 << 12, 1 << 14) if machine.rehearse else (1 << 22, 1 << 28, 1 << 16, 1 << 26):  # bytes
        t = torch.randn(size // dtype.itemsize, device=machine.device).to(dtype)
        copy = _rate(machine, 2 * size, _copies(t))
        rates = {way: round(_rate(machine, size, _sweeps(t, flags, way == "together")), 1) for way in ("together", "alone")}
        line = {"dtype": str(dtype).removeprefix("torch."), "wanted": wanted, "bytes": size, "by": path, "GB/s": rates}
        judged = size >= 1 << 22 and wanted in ("stats", "checksum")
        met = path == "Triton" and rates["together"] >= SHARE * copy if judged else None
        yield {"figure": "sweep", **line, "copy GB/s": round(copy, 1), "first_look_s": first, "met": met}


def _copies(t: torch.Tensor) -> Callable[[int], None]:
    target = torch.empty_like(t)

    def run(times: int) -> None:
        for _ in range(times):
            target.copy_(t)

    return run


def _sweeps(t: torch.Tensor, flags: int, together: bool) -> Callable[[int], None]:
    library = TorchLibrary()

    def run(times: int) -> None:
        _reduce(library.stats_rows(flags), [t] * times, together)

    return run


def _reduce(rows: Any, tensors: Sequence[torch.Tensor], together: bool) -> None:
    """Reduce tensors one by one, or in groups as a tape does: of at most 512 tensors and 128 MB."""
    most = max(1, min(512, (128 << 20) // tensors[0].nbytes)) if together else 1
    for begin in range(0, len(tensors), most):
        some = tensors[begin : begin + most]
        rows.add_all(some, range(begin, begin + len(some)))


def _rate(machine: Machine, size: int, run: Callable[[int], None]) -> float:
    """Return GB/s of `size` bytes a time: the best of three."""
    times = 3 if machine.rehearse else max(3, min(100, (1 << 31) // size))
    run(3)
    best = float("inf")
    for _ in range(3):
        machine.wait()
        begun = time.perf_counter()
        run(times)
        machine.wait()
        best = min(best, time.perf_counter() - begun)
    return size * times / best / 1e9


def _many(machine: Machine, flags: int) -> dict[str, Any]:
    """Return microseconds a tensor of 4 kB: the host's until all are reduced or given to the device, and until that is done."""
    tensors = [torch.randn(1024, device=machine.device) for _ in range(MANY)]
    library = TorchLibrary()
    found: dict[str, Any] = {"by": "Triton" if trust_in(tensors[0].device).proven((torch.float32, flags & TAKEN)) else "others"}
    for together in (True, False):
        told: list[tuple[float, float]] = []
        for _ in range(4):
            rows = library.stats_rows(flags)
            machine.wait()
            begun = time.perf_counter()
            _reduce(rows, tensors, together)
            host = time.perf_counter() - begun
            machine.wait()
            told.append((host, time.perf_counter() - begun))
        host, whole = (round(1e6 * seconds / MANY, 2) for seconds in min(told))
        found["together" if together else "alone"] = {"host_us": host, "whole_us": whole}
    return found
