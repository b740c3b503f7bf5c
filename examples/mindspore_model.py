"""`mindspore.train.Model` watched by a callback. Needs `pip install 'trainprobe[mindspore]'`; runs on a CPU in some seconds.

python examples/mindspore_model.py
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from trainprobe.integrations.mindformers import ProbeCallback

ms.set_context(mode=ms.PYNATIVE_MODE)  # in graph mode, cells and gradients are inside the compiled graph and cannot be seen


class Net(nn.Cell):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(8, 32)
        self.act = nn.GELU()
        self.down = nn.Dense(32, 1)

    def construct(self, x: Any) -> Any:
        """Return one number a row: x [batch, 8] to [batch, 1]."""
        return self.down(self.act(self.up(x)))


draw = np.random.default_rng(0)
inputs = draw.standard_normal((64, 8)).astype(np.float32)
rows = [(x, x[:1] * x[1:2]) for x in inputs]
net = Net()
model = Model(net, nn.MSELoss(), nn.AdamWeightDecay(net.trainable_params(), 1e-2))
callback = ProbeCallback(
    {"output": "./probe_out", "on_existing": "replace", "record": "L0", "step": [1], "monitor": {"optimizer_state": True}}
)
model.train(2, GeneratorDataset(rows, ["x", "y"]).batch(8), callbacks=[callback])
print(f"{len(callback.findings)} findings; step 1 in full in probe_out/step1, every step in probe_out/rank0")
