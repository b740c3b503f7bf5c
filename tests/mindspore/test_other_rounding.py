"""`trainprobe floor --way perturb` under MindSpore, and a loop that `trainprobe run` cannot watch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.mindspore.launch import ENVIRONMENT
from trainprobe.integrations.mindspore_perturbed_start import move

LOOP = """
import mindspore as ms
import numpy as np
from mindspore import nn

ms.set_device("CPU")
ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(1)
net = nn.Dense(3, 2)
before = net.weight.asnumpy().copy()
optimizer = nn.SGD(net.trainable_params(), 0.1)
again = nn.SGD(net.trainable_params(), 0.1)
assert (np.abs(net.weight.asnumpy().view(np.int32) - before.view(np.int32)) == 1).all()
gradients = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
optimizer(gradients(ms.Tensor(np.ones((2, 3), np.float32)))[1])
"""


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16, ms.float64])
def test_each_weight_moves_to_a_neighbour_and_zeros_stay(dtype: ms.Type) -> None:
    start = ms.Tensor([[0.0, 1.0, -1.0, 3.5], [2.0, -0.25, 1e-3, 0.0]], dtype)
    parameter = ms.Parameter(start, name="w")
    assert move(parameter) == 8
    assert move(parameter) == 0  # of several optimizers each weight moves once
    a, b = (t.asnumpy().astype(np.float64) for t in (start, parameter))
    epsilon = {ms.float32: 2.0**-23, ms.float16: 2.0**-10, ms.bfloat16: 2.0**-7, ms.float64: 2.0**-52}[dtype]
    distance = np.abs(b - a) / np.where(a == 0, 1, 2.0 ** np.floor(np.log2(np.abs(np.where(a == 0, 1, a)))))
    assert (distance[a == 0] == 0).all()
    assert np.isin(distance[a != 0], (epsilon, epsilon / 2)).all()  # below a power of two the neighbour is half as far
    whole = ms.Parameter(ms.Tensor([1, 2], ms.int32), name="n")
    assert move(whole) == 0 and whole.asnumpy().tolist() == [1, 2]


def test_replicas_stay_equal() -> None:
    cells = [nn.Dense(3, 2, weight_init="ones") for _ in range(2)]
    for cell in cells:
        move(cell.weight)
    assert cells[0].weight.asnumpy().tobytes() == cells[1].weight.asnumpy().tobytes()


def test_a_floor_run_moves_the_weights_and_a_loop_that_nobody_watches_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "plan.json").write_text(json.dumps({"level": "L0", "output": str(tmp_path / "out")}))
    words = [sys.executable, "-m", "trainprobe", "floor", "--way", "perturb", "plan.json", "--", sys.executable, "loop.py"]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("8 weights were moved by their last bit") == 1
    assert "nothing was watched: under MindSpore `trainprobe run` watches Model.train" in done.stderr
    assert not (tmp_path / "out").exists()
