"""What the probe puts in torch's places, and what it remembers, does not add up over steps and findings, with everything on."""

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
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.records import Finding, Site
from trainprobe.engine.core.step_layout import KEPT

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
    plan = {"level": "off", "sinks": ["parquet"], **plan}
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


LAYOUTS = ("StepLayout", "_Layout")  # steps that are collected in full differ in the numbers that calls are given


def remembered(probe: trainprobe.Probe) -> Counter[str]:
    """Count live objects of this package by their type, findings left out, and the series that the rules remember."""
    gc.collect()
    types = Counter(kind for kind in map(type, gc.get_objects()) if str(kind.__module__).startswith("trainprobe"))
    kept = Counter({kind.__qualname__: count for kind, count in types.items() if kind not in (Finding, Site)})
    assert probe.monitor.watcher is not None
    return kept + Counter({f"series of {name}": len(memory.keys) for name, memory in probe.monitor.watcher.memories.items()})


def test_findings_that_have_a_step_collected_in_full_leave_no_more_than_the_first_of_them(tmp_path):
    """The first one leaves the places of all torch calls of a step, which the rules know from then on."""
    side, now = prepare(SIZES["tiny"], "whole step"), 0
    gc.collect()
    before = Counter(type(thing).__qualname__ for thing in gc.get_objects())  # what other runs of this process have left
    plan = {"level": "off", "sinks": ["parquet"], **VARIANTS["everything"], "audit": {"every": 5, "ranks": False}}
    weights = list(side.model.parameters())  # another one each time: of the same one nothing new would be reported

    def spoil(*_):
        if now in (10, 20, 30):
            with torch.no_grad():
                weights[now // 10].view(-1)[:2] += 1e-3

    side.optimizer.register_step_post_hook(spoil)
    found, counts = [], []
    with trainprobe.watch(side.model, side.optimizer, output=tmp_path / "out", **plan) as probe:
        for now in range(36):
            with probe.step(now):
                probe.note("loss", side.step(now))
            if now % 10 == 5:
                probe.flush()
                found.append([f.step for f in probe.findings if f.rule == "update_rule"])
                counts.append(remembered(probe))
    assert found == [[], [10], [10, 20], [10, 20, 30]]
    assert sum(counts[1].values()) > sum(counts[0].values())
    assert max(count[kind] - before[kind] for count in counts for kind in LAYOUTS) <= KEPT
    later = [Counter({kind: n for kind, n in (c - counts[1]).items() if kind not in LAYOUTS}) for c in counts[2:]]
    assert later == [Counter(), Counter()]
