"""Which micro-batch a recomputed forward and a gradient belong to, when several are under way at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, tempfile, orjson, torch, trainprobe
from torch.utils.checkpoint import checkpoint

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 1)
    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=sys.argv[1] == "reentrant")).sum()

torch.manual_seed(0)
model = Model()
batches = [torch.full((2, 3), 1.0 + micro, requires_grad=True) for micro in range(3)]
with trainprobe.watch(model, output=tempfile.mkdtemp(), level="mix", sinks=["memory"], on_error="raise") as probe:
    probe.begin_step()
    losses = [model(batches[0]), model(batches[1])]
    if sys.argv[2] == "1F1B":
        losses[0].backward()
        losses.append(model(batches[2]))
        losses[1].backward()
        losses[2].backward()
    else:
        sum(losses).backward()
    step_data = probe.end_step()
largest = step_data.numbers()["max"]
again = [c for c in step_data.calls if c.phase == "recompute" and c.name == "inner" and c.kind == "module"]
gradients = [c for c in step_data.calls if c.kind == "parameter" and c.name == "head"]
print(orjson.dumps({
    "again": [[c.call, c.micro, largest[c.args[0].row] - 1.0] for c in again],
    "gradients": [[c.call, c.micro] for c in gradients],
}, option=orjson.OPT_SERIALIZE_NUMPY).decode())
"""
EXPECTED = {"1F1B": [0, 1, 2], "one backward": [1, 0]}


@pytest.mark.parametrize("order", EXPECTED)
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_what_is_recomputed_carries_the_number_and_micro_batch_of_its_forward(kind: str, order: str) -> None:
    command = [sys.executable, "-c", PROGRAM, kind, order]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = orjson.loads(done.stdout.splitlines()[-1])
    micros = EXPECTED[order]
    assert seen["again"] == [[micro, micro, float(micro)] for micro in micros]
    if order == "1F1B":
        assert seen["gradients"] == [[micro, micro] for micro in micros]
