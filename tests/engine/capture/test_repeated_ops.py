"""Ops of a forward that activation checkpointing runs again: seen, marked, numbered as the forward, and not counted twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, tempfile, pathlib, orjson, torch, trainprobe
from torch.utils.checkpoint import checkpoint

class Block(torch.nn.Module):
    def forward(self, x):
        return torch.sin(torch.sin(x) * 2)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.blocks = torch.nn.ModuleList([Block(), Block()])
    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=sys.argv[1] == "reentrant")
        return x.sum()

model, out = Model(), tempfile.mkdtemp()
x = torch.linspace(0.1, 0.9, 5)
def double(t):
    t.mul(1.0)
    return t * 2
with trainprobe.watch(model, output=out, level=sys.argv[2], sinks=["memory", "dump"], on_error="raise") as probe:
    probe.begin_step()
    loss = model(x)
    loss.register_hook(double)
    loss.backward()
    step_data = probe.end_step()
numbers = step_data.numbers()
def largest(tree):
    value = tree[0] if isinstance(tree, list) else tree
    return None if value is None else float(numbers["max"][value.row])
calls = [[c.name, c.call, c.phase, largest(c.args), largest(c.out)]
         for c in step_data.calls if c.kind == "op" and c.name in ("Torch.sin", "Tensor.mul")]
dump = orjson.loads((pathlib.Path(out) / "step0" / "rank0" / "dump.json").read_bytes())
print(orjson.dumps({"calls": calls, "keys": [k for k in dump["data"] if k.startswith("Torch.sin")]}).decode())
"""


@pytest.mark.parametrize("level", ["mix", "L1"])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_recomputed_ops_are_those_of_the_forward(kind: str, level: str) -> None:
    command = [sys.executable, "-c", PROGRAM, kind, level]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = orjson.loads(done.stdout.splitlines()[-1])
    sines = [call for call in seen["calls"] if call[0] == "Torch.sin"]
    first = {call[1]: call[3:] for call in sines if call[2] == "forward"}
    again = [call for call in sines if call[2] == "recompute"]
    assert list(first) == [0, 1, 2, 3]
    order = [2, 3, 0, 1]  # blocks are run again last to first, each from its beginning
    inputs = [call[3] for call in again]
    assert inputs == [first[n][0] for n in order]
    assert [call[1] for call in again] == (order if level == "mix" else [4, 5, 6, 7])
    for call, n in zip(again, order, strict=True):
        assert call[4] in (first[n][1], None)  # None: torch stops a recomputation at the last tensor that it needs
    own = level == "mix" or kind == "not reentrant"  # gradients flow through the calls that have autograd nodes
    gradients = sorted(call[1] for call in sines if call[2] == "backward")
    assert gradients == ([0, 1, 2, 3] if own else [4, 5, 6, 7])
    assert sorted(k for k in seen["keys"] if k.endswith("forward")) == [f"Torch.sin.{n}.forward" for n in range(4)]
    hooked = [call for call in seen["calls"] if call[0] == "Tensor.mul" and call[2] == "recompute"]
    assert len(hooked) == 2  # those of the blocks; what a hook computes in a backward pass is no forward
