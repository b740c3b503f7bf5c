"""Two steps in graph mode; MindSpore itself dumps every kernel. Arguments: settings, "inf" for a bad batch."""

import json
import os
import sys

os.environ["MINDSPORE_DUMP_CONFIG"] = sys.argv[1]

import mindspore as ms
import numpy as np
from mindspore import nn


class Block(nn.Cell):
    """Two layers around a residual."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 4)

    def construct(self, x):
        """Apply it."""
        return x + self.down(self.act(self.up(x)))


class Net(nn.Cell):
    """A block and a head."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Dense(4, 3)

    def construct(self, x):
        """Apply it."""
        return self.head(self.block(x))


ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
net = Net()
loss = nn.WithLossCell(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
step = nn.TrainOneStepCell(loss, nn.Momentum(net.trainable_params(), 0.1, 0.9))
step.set_train()
x = np.random.RandomState(0).randn(5, 4).astype(np.float32)
if sys.argv[2:] == ["inf"]:
    x[2, 1] = np.inf
losses = [float(step(ms.Tensor(x), ms.Tensor(np.array([0, 1, 2, 0, 1], np.int32)))) for _ in range(2)]
print(json.dumps({"losses": [repr(number) for number in losses]}))
