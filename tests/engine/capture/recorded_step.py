"""Records one step of a case of the zoo and prints what was seen, as JSON: run with and without the compiled parts."""

from __future__ import annotations

import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

import trainprobe
from tests import zoo
from tests.lockstep import one_step, seed_all
from trainprobe.engine.core.records import Call, StepData, Value
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_FILE
from trainprobe.engine.storage.dumps.tensor_store import SafetensorsReader


def told(step_data: StepData) -> dict[str, Any]:
    """Return calls and the extremes of each row; sums are left out, for their last bits may differ."""

    def tree(x: Any) -> Any:
        if isinstance(x, Value):
            return ["value", x.row, x.type, x.dtype, list(x.shape), x.requires_grad, x.note, x.tensor]
        if isinstance(x, list):
            return [tree(item) for item in x]
        return {k: tree(v) for k, v in x.items()} if isinstance(x, dict) else repr(x)

    def call(c: Call) -> list[Any]:
        parent = [c.parent.kind, c.parent.name, c.parent.call] if isinstance(c.parent, Call) else c.parent
        stack = "".join(step_data.stacks[c.stack]).partition(", in record")[0] if c.stack >= 0 else None
        trees = [tree(x) for x in (c.args, c.kwargs, c.out, c.params)]
        return [c.kind, c.name, c.call, c.phase, c.cls, c.micro, parent, stack, *trees]

    return {"calls": [call(c) for c in step_data.calls], "extremes": step_data.partials[:, 5:7].astype(str).tolist()}


def saved(folder: Path) -> dict[str, Any]:
    """Return dtype, shape and CRC-32 of each value in the step's tensor file."""
    path = folder / SAFETENSORS_FILE
    if not path.exists():
        return {}
    reader = SafetensorsReader(path)
    arrays = {key: reader.array(key) for key in sorted(reader.entries)}
    return {key: [reader.dtype(key), list(x.shape), zlib.crc32(np.ascontiguousarray(x).tobytes())] for key, x in arrays.items()}


def record(name: str, level: str, task: str) -> dict[str, Any]:
    """Return what one step of a case is recorded as."""
    case = zoo.load(name)
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with (
        tempfile.TemporaryDirectory() as folder,
        trainprobe.watch(model, optimizer, output=folder, level=level, task=task) as probe,
    ):
        probe.begin_step()
        one_step(case, model, optimizer, 0)
        step_data = probe.end_step()
        assert step_data is not None
        probe.flush()
        return {**told(step_data), "saved": saved(Path(folder) / "step0" / "rank0")}


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps([record(*asked.split(",")) for asked in sys.argv[1:]]))
