"""The reduction of one tensor alone: GB/s a core, warm and cold, and microseconds for a small tensor.

Prints one JSON line a figure: by the compiled kernel, by this package's torch operations, and by torch's own four
reductions (max, min, mean, norm: the least that a tool without a kernel of its own must run). One thread; the best of
several repetitions in CPU time, because a shared machine only ever adds.

    python -m benchmarks.kernel [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import torch

from trainprobe.engine.arrays import torch_arrays
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, STATS, STD

WANTED = {"stats": STATS, "checksum": CHECKSUM, "stats+checksum": STATS | CHECKSUM, "stats+std": STATS | STD, "crc32": CRC32}
SIZES = {"small": 64, "1k": 1000, "warm": 1 << 16, "cold": 1 << 26}  # elements


def seconds(run: Callable[[], object], budget: float) -> float:
    """Return the least CPU time of one call, in repetitions within a budget of seconds."""
    run()
    start = time.process_time()
    run()
    calls = max(1, min(20_000, int(0.02 / max(time.process_time() - start, 1e-6))))
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end or best == float("inf"):
        start = time.process_time()
        for _ in range(calls):
            run()
        best = min(best, (time.process_time() - start) / calls)
    return best


def by_row_buffer(t: torch.Tensor, flags: int, native: bool) -> Callable[[], object]:
    stats_rows = TorchStatsRows(flags, native=native)

    def run() -> None:
        stats_rows.add(t)
        if len(stats_rows) >= 4096:
            stats_rows.drain()

    return run


def by_four_reductions(t: torch.Tensor) -> Callable[[], object]:
    return lambda: (t.max(), t.min(), t.mean(), t.norm())


def ways(t: torch.Tensor) -> Iterator[tuple[str, str, Callable[[], object]]]:
    for wanted, flags in WANTED.items():
        if torch_arrays.native_in_use():
            yield "native", wanted, by_row_buffer(t, flags, True)
    for wanted in ("stats", "stats+checksum"):
        yield "torch operations", wanted, by_row_buffer(t, WANTED[wanted], False)
    if t.dtype.is_floating_point and t.element_size() > 1:
        yield "torch max, min, mean, norm", "stats", by_four_reductions(t)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="float32 and bfloat16 only, short repetitions")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    native = torch_arrays._native
    if native is not None:
        native.set_threads(1)
    dtypes = ("float32", "bfloat16") if quick else ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "complex64")
    for name in dtypes:
        dtype = getattr(torch, name)
        for size, elements in SIZES.items():
            count = elements if dtype.itemsize <= 4 else max(1, elements * 4 // dtype.itemsize)
            t = torch.randn(count, dtype=dtype) if dtype.is_complex else (torch.randn(count) * 50).abs().to(dtype)
            for way, wanted, run in ways(t):
                took = seconds(run, 0.1 if quick else 0.3)
                figure = {
                    "way": way,
                    "what": wanted,
                    "dtype": name,
                    "size": size,
                    "elements": count,
                    "us": round(took * 1e6, 3),
                }
                if way == "native" and native is not None:
                    figure["instruction_set"] = native.instruction_set()
                if size in ("warm", "cold"):
                    figure["GB/s"] = round(t.nbytes / took / 1e9, 2)
                print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
