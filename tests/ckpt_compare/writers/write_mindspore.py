"""Write the MindSpore files of tests/ckpt_compare/data/mindspore.

Usage: write_mindspore.py OUT, with mindspore 2.10 and numpy < 2.
"""

from __future__ import annotations

import os
import sys

import mindspore as ms
import numpy as np
from mindspore import nn


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Dense(3, 5), nn.Dense(5, 2)

    def construct(self, x):
        return self.fc2(self.fc1(x))


def main() -> None:
    os.chdir(sys.argv[1])
    ms.set_device("CPU")
    ms.set_seed(0)
    net = Net()
    optimizer = nn.AdamWeightDecay(net.trainable_params())
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    for _ in range(2):
        step(ms.Tensor(np.ones((4, 3), np.float32)), ms.Tensor(np.zeros((4, 2), np.float32)))
    ms.save_checkpoint(optimizer, "adam.ckpt", append_dict={"epoch_num": 1, "note": "text"}, crc_check=True)
    ms.save_checkpoint(optimizer, "adam", append_dict={"epoch_num": 1}, format="safetensors")
    halves = [{"name": p.name, "data": ms.Tensor(p.asnumpy()).astype(ms.bfloat16)} for p in net.get_parameters()]
    ms.save_checkpoint(halves, "half.ckpt")
    read = ms.load_checkpoint("adam.ckpt")  # the oracle: what MindSpore itself reads
    np.savez("adam.npz", **{k: v.asnumpy() for k, v in read.items() if hasattr(v, "asnumpy")})


if __name__ == "__main__":
    main()
