"""What is put in place of torch's functions does not add up over steps, with everything on and every framework loaded."""

from __future__ import annotations

import gc
from collections import Counter
from types import FunctionType

import pytest
import torch
import torch.distributed.fsdp

import trainprobe
from benchmarks.models import SIZES, prepare
from benchmarks.monitor_memory import VARIANTS
from trainprobe.engine.taps.replaced import Replaced

PLANS = {
    "everything": VARIANTS["everything"],
    "audit now and then": {
        "audit": {"every": 3},
        "monitor": {"step": "every 2", "batches": True, "features": {"dead_units": True}},
    },
    "dump": {"level": "mix"},
    "dump and monitor": {"level": "L0", "step": "every 2", "monitor": True},
}


def ours() -> Counter[str]:
    """Count live functions of this package, closures one by one, and what replaces something."""
    gc.collect()
    kinds = (FunctionType, Replaced)
    alive = (thing for thing in gc.get_objects() if type(thing) in kinds and str(thing.__module__).startswith("trainprobe"))
    return Counter(getattr(thing, "__qualname__", "Replaced") for thing in alive)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_same_stands_in_torchs_places_after_many_steps_as_after_few(tmp_path, plan):
    side = prepare(SIZES["tiny"], "whole step")
    plan = {"level": "off", "sinks": ["jsonl"], **plan}
    with trainprobe.watch(side.model, side.optimizer, output=tmp_path / "out", **plan) as probe:
        for step in range(37):
            with probe.step(step):
                probe.note("loss", side.step(step))
                torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
            if step == 12:
                probe.flush()
                few = ours()
        probe.flush()
        many = ours()
    assert many - few == Counter()
