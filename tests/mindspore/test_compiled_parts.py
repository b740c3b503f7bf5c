"""A function under `ms.jit` in PyNative mode: what is compiled is not seen, and the run says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from trainprobe.engine.capture.mindspore.cells import COMPILED, UNCALLED
from trainprobe.watching import watch


class Net(nn.Cell):
    """Calls its second layer in a function of its own, which may be compiled."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        a, b, c = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)

        def part(x: Any) -> Any:
            return ops.relu(b(x))

        self.a, self.b, self.c = a, b, c
        self.part = ms.jit(part) if compiled else part

    def construct(self, x: Any) -> Any:
        return self.c(self.part(self.a(x))).sum()


def _flat(loss: Any, gradients: Any) -> list[Any]:
    return [loss, *gradients]


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("compiled", ["nothing", "a part", "all"])
def test_what_is_compiled_is_said(compiled: str, level: str, tmp_path: Path) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(1)  # of weights with which a gradient comes through
    net = Net(compiled == "a part")
    if compiled == "all":
        inner = net

        @ms.jit
        def forward(x: Any) -> Any:
            return inner(x)
    else:
        forward = net
    step = ms.value_and_grad(forward, None, ms.ParameterTuple(net.trainable_params()))
    x = ms.Tensor(np.ones((2, 4), np.float32))
    bare = [t.asnumpy().tobytes() for t in _flat(*step(x))]
    with watch(net, level=level, output=str(tmp_path / "out"), on_error="raise", console=False) as probe:
        for _ in range(2):
            with probe.step():
                loss, gradients = step(x)
            assert [t.asnumpy().tobytes() for t in (loss, *gradients)] == bare
    head = json.loads((tmp_path / "out/step0/rank0/dump.json").read_text())
    notes = head["trainprobe"]["notes"]
    for cell in () if compiled == "all" else ("a", "c"):  # the gradient comes through what is compiled
        assert head["data"][f"Cell.{cell}.Dense.backward.0"]["input"][0]["Norm"] > 0
    said = [finding.message for finding in probe.findings if finding.rule == "mindspore"]
    if compiled == "nothing":
        assert said == []
    elif compiled == "all":
        assert said == [COMPILED] and COMPILED in notes
    else:
        assert said == [f"the cell b was {UNCALLED}"] and said[0] in notes
