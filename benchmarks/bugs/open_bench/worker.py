"""Runs programs of the open bench on this rank: of each the healthy twin, and then its bugs.

python -m benchmarks.bugs.open_bench.worker PLAN RESULT_FOLDER BUG...

Each program runs in a process that is forked behind the imports, so that none leaves anything behind for the next.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bugs.open_bench.bug import OpenBug, Watch, plan_named
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


def run(bugs: list[OpenBug], plan: str, result: Path) -> None:
    """Run bugs that share a program, and write what was found."""
    if bugs[0].ranks > 1:
        met = result.parent.resolve() / f"{bugs[0].program.__name__}.store"
        dist.init_process_group("gloo", init_method=f"file://{met}", rank=int(os.environ["RANK"]), world_size=bugs[0].ranks)
    done = {name: train(bugs[0].program, name, plan_named(plan)) for name in ("", *(bug.name for bug in bugs))}
    result.write_text(json.dumps(done))
    if dist.is_initialized():
        dist.destroy_process_group()
        settle()


def forked(bugs: list[OpenBug], plan: str, result: Path) -> None:
    """Do that in a process of its own; what goes wrong there is written beside the result."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        run(bugs, plan, result)
    except BaseException:  # noqa: BLE001 (it is reported by the process that waits)
        result.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    """Run the named bugs, program by program."""
    plan, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    chosen = sorted((bug for bug in OPEN if bug.name in names), key=lambda bug: bug.program.__name__)
    for name, group in groupby(chosen, key=lambda bug: bug.program.__name__):
        forked(list(group), plan, folder / f"{name}.{os.environ.get('RANK', '0')}.json")


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
