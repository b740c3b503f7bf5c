"""What the compiled parts record and write is what their Python twins do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch

from trainprobe.compiled import native
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.storage.dumps.entry_text import quote
from trainprobe.engine.taps.gradients import Graph

pytestmark = pytest.mark.skipif(native is None, reason="the compiled parts are not built")
ROOT = Path(__file__).parents[3]
CASES = (
    "residual_gpt",
    "checkpoint_reentrant",
    "structured_outputs",
    "inplace_relu",
    "data_writes",
    "large_views",
    "odd_dtypes",
)


def recorded(compiled: str) -> dict[str, dict[str, object]]:
    """Return what a fresh process records of each case, by `case,level,task`; compiled: "1", or "0" for the twins."""
    asked = [f"{case},{level},{task}" for case in CASES for level, task in (("mix", "statistics"), ("L1", "tensor"))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.taps.recorded_step", *asked],
        cwd=ROOT,
        env={**os.environ, "TRAINPROBE_NATIVE": compiled},
        capture_output=True,
        timeout=300,
        check=True,
    )
    return dict(zip(asked, orjson.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    """Return what is recorded with the compiled parts, and without them."""
    return recorded("1"), recorded("0")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("level", "task"), [("mix", "statistics"), ("L1", "tensor")])
def test_a_step_is_recorded_alike(case, level, task, both):
    ours, theirs = (side[f"{case},{level},{task}"] for side in both)
    assert ours["calls"] == theirs["calls"]
    assert ours["extremes"] == theirs["extremes"]
    assert ours["saved"] == theirs["saved"]
    assert bool(ours["saved"]) == (task == "tensor")


def test_a_text_that_json_must_escape_is_escaped():
    assert orjson.loads(quote('a"b\\c\n')) == 'a"b\\c\n'


def test_a_call_stack_is_the_same_lines():
    plain = Stacks()
    numbers = [(here := Stacks()).capture(-1, 0, 1), Stacks.capture(plain, -1, 0, 1)]
    assert numbers == [0, 0]
    ours, theirs = here.text()[0], plain.text()[0]
    assert ours[1:] == theirs[1:] and len(ours) > 5


def test_the_consumers_of_an_edge_are_the_same():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    z = (y + 1) * y + x
    ours, theirs = native.Graph(), Graph()
    edges = [(y.grad_fn, 0), (y.grad_fn.next_functions[0][0], 0)]
    for graph in (ours, theirs):
        graph.visit([z.grad_fn], 0)
    for edge in edges:
        found, expected = ours.consumers(edge, 0), theirs.consumers(edge, 0)
        assert [(node.name(), i) for node, i in found] == [(node.name(), i) for node, i in expected]
        assert len(found) == 2
