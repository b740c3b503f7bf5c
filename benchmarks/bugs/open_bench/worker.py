"""Runs one program of the open bench on this rank: its healthy twin, and then each of its bugs.

python -m benchmarks.bugs.open_bench.worker PLAN RESULT BUG...
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bugs.open_bench.bug import Watch, plan_named
from benchmarks.bugs.open_bench.catalogue import OPEN
from tests.distributed.one_rank import settle


def train(program: Any, bug: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Train once; return the findings and the CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="trainprobe_open_", ignore_cleanup_errors=True) as folder:
        watch = Watch(plan, Path(folder) / "probe_out")
        began = time.process_time()
        try:
            program(bug, watch)
        finally:
            torch.set_default_dtype(torch.float32)
        gc.collect()
        return {"findings": watch.findings(), "seconds": time.process_time() - began}


def main() -> None:
    """Run the named bugs, which share a program."""
    plan, result, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    chosen = [bug for bug in OPEN if bug.name in names]
    if chosen[0].ranks > 1:
        dist.init_process_group("gloo")
    done = {name: train(chosen[0].program, name, plan_named(plan)) for name in ("", *(bug.name for bug in chosen))}
    result.write_text(json.dumps(done))
    if dist.is_initialized():
        dist.destroy_process_group()
        settle()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
