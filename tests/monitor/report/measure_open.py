"""How long the page of a large run takes to open: `python tests/monitor/report/measure_open.py [metrics]` prints it.

A run of 100 layers, 10,000 steps and 8 ranks. No test, because a time depends on what else the machine does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trainprobe.monitor.report import Metric, RunView, write_page


def large_run(metrics: int = 2) -> RunView:
    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0, 0.15, (8, 100, 10_000)).astype(np.float32))
    values = noise * np.exp(np.linspace(0, 1.5, 100, dtype=np.float32))[None, :, None]
    steps, rows = np.arange(10_000), [f"layers.{i}" for i in range(100)]
    return RunView(
        "100 layers × 10,000 steps × 8 ranks",
        scalars={"loss": (steps, rng.random(10_000)), "grad_norm": (steps, rng.random(10_000))},
        metrics=[Metric(f"values {k}", rows, steps, values * (k + 1)) for k in range(metrics)],
    )


def main() -> None:
    from chromium import Browser, require_chromium

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = write_page(large_run(int(sys.argv[1]) if len(sys.argv) > 1 else 4), Path(folder) / "report.html")
        print(f"written in {time.perf_counter() - start:.1f} s, {path.stat().st_size / 1e6:.1f} MB")
        browser = Browser(require_chromium())
        times = [browser.open(path) for _ in range(5)]
        browser.close()
        print(f"ready after {min(times):.2f} s at best, {sorted(times)[2]:.2f} s in the median of 5")


if __name__ == "__main__":
    main()
