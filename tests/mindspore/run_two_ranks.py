"""Data-parallel training in 2 processes, as msrun starts them: each has its own data, gradients are averaged.

Argument: the folder for what is written. Trainings follow each other: bare; watched; watched with a NaN that rank 1 reads in
step 3; and with one thing planted on rank 1 for the audit to find: a weight that is written to, another learning rate, the
data of rank 0, a gradient that is not reduced. In "tensor" both ranks compute one model together, and in "other tokens" they
get different data all the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank, init
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from tests.mindspore import tiny
from trainprobe.integrations.mindformers import ProbeCallback


class Step(nn.Cell):
    """What `nn.TrainOneStepCell` does in data-parallel mode, where that mode is not set."""

    def __init__(self, network: Any, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self.network.set_grad()
        self.grad = ms.ops.GradOperation(get_by_list=True)
        self.reduce = nn.DistributedGradReducer(optimizer.parameters, True, 2)

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        grads = self.reduce(self.grad(self.network, self.optimizer.parameters)(*inputs))
        self.optimizer(grads)
        return loss


class Writes(Callback):
    """Writes to one weight of rank 1 before step 3."""

    def __init__(self, net: Any, number: float) -> None:
        self.net, self.number = net, number

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 3 and get_rank() == 1:
            bias = self.net.blocks[1].up.bias
            changed = bias.asnumpy().copy()
            changed[2] += self.number
            ms.ops.assign(bias, ms.Tensor(changed))


class OwnGradient(Step):
    """Leaves the gradient of `head.bias` as it is on this rank."""

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        own = self.grad(self.network, self.optimizer.parameters)(*inputs)
        names = [p.name for p in self.optimizer.parameters]
        pairs = zip(names, own, self.reduce(own), strict=True)
        self.optimizer(tuple(mine if name == "head.bias" else reduced for name, mine, reduced in pairs))
        return loss


def train(name: str, output: str | None) -> None:
    ms.set_seed(1234)
    net = tiny.Net()
    rate = 2e-2 if name == "rate" and get_rank() == 1 else 1e-2
    optimizer = nn.AdamWeightDecay(net.trainable_params(), rate)
    cell = OwnGradient if name == "unreduced" else Step
    model = Model(cell(nn.WithLossCell(net, tiny.Loss()), optimizer))
    plan = {"output": output, "level": "off", "monitor": {"optimizer_state": True}, "sinks": ["jsonl"], "audit": {"every": 1}}
    axes = {"tp": (get_rank(), 2)} if name in ("tensor", "other tokens") else None
    callbacks: list[Any] = [ProbeCallback(plan, axes=axes)] if output else []
    if name in ("broken", "written"):
        callbacks.insert(0, Writes(net, np.nan if name == "broken" else 1e-3))
    seed = 0 if name in ("data", "tensor") else get_rank()
    data = GeneratorDataset(tiny.Data(seed=seed), ["x", "y"], shuffle=False).batch(tiny.BATCH)
    model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    held = [p.asnumpy().tobytes() for p in (*net.get_parameters(), *optimizer.get_parameters())]
    told: dict[str, Any] = {"rank": get_rank(), "name": name, "bits": hashlib.sha256(b"".join(held)).hexdigest()}
    if output:
        told["findings"] = [
            [f.rule, f.step, f.place.rank if f.place else None, f.message, f.site.name if f.site else None]
            for f in callbacks[-1].findings
            if f.severity != "info"
        ]
    print(json.dumps(told), flush=True)


def main(folder: str) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    init()
    train("bare", None)
    for name in ("on", "broken", "written", "rate", "data", "unreduced", "tensor", "other tokens"):
        train(name, f"{folder}/{name}")


if __name__ == "__main__":
    main(sys.argv[1])
