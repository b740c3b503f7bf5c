"""Records a step of each case of the zoo; prints, as JSON, its journal just before it ends and its step data."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import torch

import trainprobe
from tests import zoo
from tests.lockstep import one_step, seed_all
from trainprobe.engine.core.records import Call, StepData
from trainprobe.engine.core.step_data import parent_name
from trainprobe.engine.storage.step_journal import read_journal
from trainprobe.monitor.black_box.ring import read_journal_bytes

MONITOR = {"activations": True, "activation_gradients": True, "parameters": True, "optimizer_state": True, "update": True}


def told(step_data: StepData) -> dict[str, Any]:
    """Return calls, records and scalars, in an order of their own: a call may begin before another and be told after it."""

    there = {id(c) for c in step_data.calls}

    def call(c: Call) -> str:
        known = not isinstance(c.parent, Call) or id(c.parent) in there  # a recomputed forward may not be recorded
        return repr((c.kind, c.name, c.call, c.phase, c.cls, c.micro, c.node, parent_name(c) if known else None))

    records = [
        repr((r.step, r.site, r.dtype, tuple(r.shape), sorted((k, repr(v)) for k, v in r.values.items()), r.note))
        for r in step_data.records()
    ]
    return {
        "step": step_data.step,
        "place": repr(step_data.place),
        "calls": sorted(map(call, step_data.calls)),
        "records": sorted(records),
        "scalars": {name: repr(x) for name, x in sorted(step_data.scalars.items())},
    }


def record(name: str, level: str, native: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the journal of a step says of it, and what its collected step does."""
    case = zoo.load(name)
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = {"level": level, "monitor": MONITOR, "black_box": True, "on_error": "raise", "native": native}
    with tempfile.TemporaryDirectory() as folder, trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for step in range(2):
            probe.begin_step()
            one_step(case, model, optimizer, step)
            probe.note("loss", torch.tensor(2.5))
            found = read_journal(read_journal_bytes(Path(folder) / "rank0" / "black_box.ring"))
            step_data = probe.end_step()
        assert step_data is not None and found is not None
        return told(found[0]), told(step_data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    native = sys.argv[1] == "kernels"
    found = {f"{name} {level}": record(name, level, native) for name in zoo.NAMES for level in ("mix", "off")}
    sys.stdout.buffer.write(orjson.dumps(found))
