"""One model on two ranks in several layouts, healthy and with a fault of one rank, each against one process.

Those with `+states` also hold what the optimizer keeps; their faults are of the optimizer of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.launch import launch
from tests.dump_compare import train_layouts
from trainprobe.dump_compare.command import compare_dumps
from trainprobe.dump_compare.results import DumpsVerdict

STATES = ("ddp+states", "fsdp1+states", "fsdp2+states", "tensor+states", "redundancy+states")
HEALTHY = ("ddp", "fsdp1", "fsdp2", "tensor", "context", *STATES)
FAULTS = (
    *("fsdp1:shard", "fsdp2:shard", "tensor:shard", "tensor:column", "tensor:reduce"),
    *("context:weight", "context:gradients", "ddp:scale", "ddp:weight", "ddp:gradients"),
    *(f"{layout}:{fault}" for layout in STATES for fault in ("moment", "square", "steps", "lost", "rate", "decay", "betas")),
)


@dataclass(frozen=True)
class Pair:
    """What became of a layout beside one process. seconds: of CPU, for the comparison alone."""

    name: str
    healthy: bool
    found: DumpsVerdict
    seconds: float


def pairs(only: str, folder: Path) -> Iterator[Pair]:
    """Train all layouts whose name holds `only`, and yield how each compares with one process."""
    wanted = [name for name in (*HEALTHY, *FAULTS) if only in name]
    if not wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for level in {name.partition(":")[0].partition("+")[2] for name in wanted}:
        train_layouts.train(folder / f"alone+{level}", level=level or "L0")
    launch(str(Path(train_layouts.__file__)), 2, str(folder), *wanted, timeout=300)
    for name in wanted:
        start = time.process_time()
        level = name.partition(":")[0].partition("+")[2]
        _, found = compare_dumps(folder / f"alone+{level}", folder / name)
        yield Pair(name, name in HEALTHY, found, time.process_time() - start)
