"""Data-parallel training in 2 processes, as msrun starts them: each has its own data, gradients are averaged.

Argument: the folder for what is written. Three trainings follow each other: bare, watched, and watched with a NaN that rank 1
reads in step 3.
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


class Breaks(Callback):
    def __init__(self, net: Any) -> None:
        self.net = net

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 3 and get_rank() == 1:
            bias = self.net.blocks[1].up.bias
            broken = bias.asnumpy().copy()
            broken[2] = np.nan
            bias.set_data(ms.Tensor(broken))


def train(name: str, output: str | None) -> None:
    ms.set_seed(1234)
    net = tiny.Net()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-2)
    model = Model(Step(nn.WithLossCell(net, tiny.Loss()), optimizer))
    plan = {"output": output, "level": "off", "monitor": {"optimizer_state": True}, "sinks": ["jsonl"]}
    callbacks: list[Any] = [ProbeCallback(plan)] if output else []
    if name == "broken":
        callbacks.insert(0, Breaks(net))
    data = GeneratorDataset(tiny.Data(seed=get_rank()), ["x", "y"], shuffle=False).batch(tiny.BATCH)
    model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    held = [p.asnumpy().tobytes() for p in (*net.get_parameters(), *optimizer.get_parameters())]
    told: dict[str, Any] = {"rank": get_rank(), "name": name, "bits": hashlib.sha256(b"".join(held)).hexdigest()}
    if output:
        told["findings"] = [[f.rule, f.step, f.place.rank if f.place else None, f.message] for f in callbacks[-1].findings]
    print(json.dumps(told), flush=True)


def main(folder: str) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    init()
    train("bare", None)
    train("on", f"{folder}/on")
    train("broken", f"{folder}/broken")


if __name__ == "__main__":
    main(sys.argv[1])
