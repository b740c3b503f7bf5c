"""Checkpoints that MindSpore writes here and now, compared with each other and with what MindSpore itself reads."""

from __future__ import annotations

from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import nn

from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.cli import main


def trained() -> tuple[nn.Cell, nn.Optimizer]:
    """Return a small model and its optimizer after two steps."""
    mindspore.set_seed(0)
    net = nn.SequentialCell(nn.Dense(3, 5), nn.ReLU(), nn.Dense(5, 2))
    optimizer = nn.AdamWeightDecay(net.trainable_params())
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    for _ in range(2):
        step(mindspore.Tensor(np.ones((4, 3), np.float32)), mindspore.Tensor(np.zeros((4, 2), np.float32)))
    return net, optimizer


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Write the same state as `.ckpt` and as safetensors, and beside them one whose last weight is one element off."""
    net, optimizer = trained()
    mindspore.save_checkpoint(optimizer, str(tmp_path / "same.ckpt"), crc_check=True)
    mindspore.save_checkpoint(optimizer, str(tmp_path / "same"), format="safetensors")
    weight = net.trainable_params()[2]
    changed = weight.asnumpy().copy()
    changed[1, 3] += 0.5
    weight.set_data(mindspore.Tensor(changed))
    mindspore.save_checkpoint(optimizer, str(tmp_path / "other.ckpt"))
    return {name: tmp_path / name for name in ("same.ckpt", "same.safetensors", "other.ckpt")}


def test_each_tensor_is_read_as_mindspore_itself_reads_it(files):
    held = mindspore.load_checkpoint(str(files["same.ckpt"]))
    found = open_checkpoint(files["same.ckpt"]).tensors.values()
    assert len(found) == 12
    assert all(np.array_equal(t.pieces[0].source.load(), held[t.native or t.name].asnumpy()) for t in found)


def test_both_file_formats_of_one_training_are_identical(files, capsys):
    assert main(["ckpt-compare", str(files["same.ckpt"]), str(files["same.safetensors"])]) == 0
    assert capsys.readouterr().out.startswith("identical")


def test_one_element_is_found_and_named(files, capsys):
    assert main(["ckpt-compare", str(files["same.ckpt"]), str(files["other.ckpt"])]) == 2
    assert "2.weight" in capsys.readouterr().out.splitlines()[0]
