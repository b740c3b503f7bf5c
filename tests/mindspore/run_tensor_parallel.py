"""A tensor-parallel pair of linear layers, written by hand, in PyNative mode: one rank holds all of it, two hold a half each.

Arguments: the folder for what is written; the number of ranks. Two ranks train three times; something is planted on rank 1 in
the last two: its part of the column weight's gradient is scaled ("gradient"), what it adds to the output of the row-parallel
layer is left out of its own sum ("no_reduce").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

from trainprobe.engine.core.records import Place
from trainprobe.watching import watch

WIDTH, INNER, STEPS = 6, 8, 2
RANK, RANKS = 0, 1
PLAN = {"level": "L0", "summary": "both", "monitor": {"parameters": True, "gradients": True, "optimizer_state": True}}


def _summed(x: Any) -> Any:
    return ops.AllReduce()(x) if RANKS > 1 else x


class Spread(nn.Cell):
    """Passes a tensor to all ranks; the gradients that they have for it are added up."""

    def construct(self, x: Any) -> Any:
        return x

    def bprop(self, x: Any, out: Any, gradient: Any) -> Any:
        return (_summed(gradient),)


class Summed(nn.Cell):
    """Adds up what the ranks have; each has the whole gradient."""

    left_out = False

    def construct(self, x: Any) -> Any:
        whole = _summed(x)
        return x if self.left_out else whole

    def bprop(self, x: Any, out: Any, gradient: Any) -> Any:
        return (gradient,)


class ColumnParallelLinear(nn.Cell):
    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.weight, self.bias = _cut(weight, "weight", 0), _cut(bias, "bias", 0)

    def construct(self, x: Any) -> Any:
        return ops.matmul(x, self.weight.T) + self.bias


class RowParallelLinear(nn.Cell):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.reduce = _cut(weight, "weight", 1), Summed()

    def construct(self, x: Any) -> Any:
        return self.reduce(ops.matmul(x, self.weight.T))


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng(3)

        def weight(*shape: int) -> np.ndarray:
            return draw.standard_normal(shape).astype(np.float32)

        self.first = nn.Dense(WIDTH, WIDTH, ms.Tensor(weight(WIDTH, WIDTH)), "zeros")
        self.spread = Spread()
        self.up = ColumnParallelLinear(weight(INNER, WIDTH), weight(INNER))
        self.act = nn.GELU()
        self.down = RowParallelLinear(weight(WIDTH, INNER))

    def construct(self, x: Any) -> Any:
        return self.down(self.act(self.up(self.spread(self.first(x)))))


def _cut(whole: Any, name: str, dim: int) -> ms.Parameter:
    parameter = ms.Parameter(ms.Tensor(np.split(whole, RANKS, dim)[RANK].copy()), name=name)
    parameter.tensor_model_parallel, parameter.partition_dim = True, dim
    return parameter


def train(folder: str, planted: str) -> None:
    net = Net()
    net.down.reduce.left_out = planted == "no_reduce" and RANK == 1
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-2)
    backward = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    data = np.random.default_rng(5).standard_normal((STEPS, 4, WIDTH)).astype(np.float32)
    place = Place(RANK, RANKS, {"tp": (RANK, RANKS)} if RANKS > 1 else {})
    plan = {**PLAN, "audit": {"every": 1}, "output": f"{folder}/{planted}", "on_error": "raise", "console": False}
    losses = []
    with watch(net, optimizer, plan, place=place) as probe:
        for x in data:
            with probe.step():
                loss, gradients = backward(ms.Tensor(x))
                if planted == "gradient" and RANK == 1:
                    names = [p.name for p in optimizer.parameters]
                    gradients = tuple(g * 1.5 if n == "up.weight" else g for n, g in zip(names, gradients, strict=True))
                optimizer(gradients)
                losses.append(float(loss.asnumpy()))
                probe.note("loss", loss)
    found = [[f.rule, f.step, f.message] for f in probe.findings if f.severity != "info"]
    folder = f"{folder}/{planted}_weights/rank_{RANK}"
    Path(folder).mkdir(parents=True)
    ms.save_checkpoint(net, f"{folder}/net.ckpt")
    print(json.dumps({"rank": RANK, "name": planted, "losses": losses, "findings": found}), flush=True)


if __name__ == "__main__":
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    RANK, RANKS = 0, int(sys.argv[2])
    if RANKS > 1:
        init()
        RANK, RANKS = get_rank(), get_group_size()
    for name in ("healthy", "gradient", "no_reduce") if RANKS > 1 else ("healthy",):
        train(sys.argv[1], name)
