"""The device's own operators, on torch's sample inputs, judged by op-check: none may be called a bug but those that are one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from benchmarks.op_check.calibration import Calibration, judge_entry, label_of, op_infos

SECONDS, SAMPLES = 50, 2
# operator → what is wrong with it on the CPU too (docs/op_check.md)
RIGHTLY = {"matrix_exp": "NaN in 16 bits", "soft_margin_loss": "overflows in float16", "rand_like": "torch's list runs another"}


def figures(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a line for each twenty entries, and one for each operator that is called a bug."""
    if machine.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        infos = [*op_infos()]
    except SystemExit as missing:
        yield {"figure": "operators", "met": None, "why": str(missing)}
        return
    infos = infos[::97] if machine.rehearse else [info for first in range(7) for info in infos[first::7]]  # all kinds early
    found, end, told = Calibration(entries=len(infos)), time.monotonic() + SECONDS, 0
    for i, info in enumerate(infos):
        judge_entry(found, label_of(info), info, SAMPLES, machine.device, (torch.bfloat16, torch.float16, torch.float32))
        found.done += 1
        for wrong in found.wrong[told:]:
            met = None if _rightly(wrong) else not wrong[3].startswith("bug")
            yield {"figure": "called", "wrong": [*map(str, wrong)], "met": met}
        told = len(found.wrong)
        if time.monotonic() > end or i + 1 == len(infos):
            break
        if i % 20 == 19:
            yield _summary(found)
    yield _summary(found)


def _summary(found: Calibration) -> dict[str, Any]:
    counts = {f"{dtype} {direction}": dict(outcomes) for (dtype, direction), outcomes in found.counts.items()}
    bugs = sum(wrong[3].startswith("bug") and not _rightly(wrong) for wrong in found.wrong)
    return {"figure": "operators", "entries": found.done, "of": found.entries, "counts": counts, "bugs": bugs, "met": bugs == 0}


def _rightly(wrong: Sequence[Any]) -> bool:
    return str(wrong[0]).rpartition(".")[2] in RIGHTLY
