"""A script for mindstudio-probe under MindSpore, run with that package or with ours: FOLDER LEVEL PACKAGE PATH [planted].

PATH is appended to where Python looks: the site-packages of an environment that holds mindstudio-probe. planted: one element of
the weight of `up` is another one in the last step.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops

folder, level, package, path = sys.argv[1:5]
sys.path.append(path)
ms.set_device("CPU")
ms.set_context(mode=ms.PYNATIVE_MODE)
if package == "msprobe":  # a CPU has no kernel for the norm of `mint`, which that tool's statistics ask for
    mint.norm = lambda x: ms.Tensor(np.linalg.norm(x.asnumpy().astype(np.float64)).astype(np.float32))
front = importlib.import_module(f"{package}.mindspore")


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(3, 4)
        self.act = nn.ReLU()
        self.down = nn.Dense(4, 1)

    def construct(self, x: Any) -> Any:
        return self.down(self.act(self.up(x))) + ops.relu(x).sum()


front.seed_all(7, rm_dropout=False)
np.random.seed(7)
net = Net()
optimizer = nn.SGD(net.trainable_params(), 0.1)
gradient = ms.value_and_grad(lambda x: net(x).mean(), None, optimizer.parameters)
config = Path(folder) / "config.json"
settings: dict[str, Any] = {"task": "statistics", "dump_path": f"{folder}/out", "rank": [], "step": [], "level": level}
config.write_text(json.dumps({**settings, "statistics": {"scope": [], "list": [], "data_mode": ["all"]}}))
debugger = front.PrecisionDebugger(config_path=str(config))
for step in range(2):
    if step == 1 and "planted" in sys.argv:
        net.up.weight[2, 1] += 0.25
    debugger.start(net)
    loss, gradients = gradient(ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)))
    if level == "debug":
        debugger.save({"loss": loss, "list": [loss, 3]}, "values")
    debugger.stop()
    debugger.step()
    optimizer(gradients)
bits = b"".join(p.asnumpy().tobytes() for p in net.get_parameters()).hex()
(Path(folder) / "bits.txt").write_text(bits)
