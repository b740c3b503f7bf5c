"""Checkpoints that MindSpore writes here and now, compared with each other and with what MindSpore itself reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import node_strategy_pb2

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


# parameter → (whole shape, matrix of devices, axis of each dimension from the right, step and size of the optimizer's cut)
CUTS = {
    "column.weight": ((8, 6), (2, 2), (0, -1), 0, 0),
    "row.weight": ((4, 8), (2, 2), (-1, 0), 0, 0),
    "norm.gamma": ((8,), (2, 2), (-1,), 1, 4),
    "both.weight": ((8, 6), (2, 2), (0, -1), 2, 2),
    "same.bias": ((3,), (2, 2), (-1,), 0, 0),
    "grid.weight": ((4, 6), (2, 2), (1, 0), 0, 0),
}


def test_parts_of_four_ranks_are_joined_as_mindspore_joins_them(tmp_path: Path) -> None:
    """The strategy file is written by MindSpore's own protocol; the oracle is its `transform_checkpoints`."""
    told = node_strategy_pb2.ParallelStrategyMap(current_stage=0)
    whole = {name: np.random.default_rng(len(name)).standard_normal(cut[0]).astype(np.float32) for name, cut in CUTS.items()}
    ranks: list[list[dict[str, Any]]] = [[] for _ in range(4)]
    for name, (_, devices, axes, step, size) in CUTS.items():
        item = told.parallel_layout_item.add(param_name=name)
        layouts = item.parallel_layouts
        layouts.dev_matrix.add(dim=devices)
        layouts.tensor_map.add(dim=axes)
        layouts.param_split_shape.add(dim=[])
        layouts.indices_offset.add(dim=[])
        layouts.field, layouts.opt_weight_shard_step, layouts.opt_weight_shard_size = 0, step, size
        for rank in range(4):
            at, part = (rank // 2, rank % 2), whole[name]
            for dimension, axis in enumerate(axes):
                if axis >= 0:
                    part = np.split(part, devices[1 - axis], dimension)[at[1 - axis]]
            if size:
                part = np.split(part, size, 0)[rank // step % size]
            ranks[rank].append({"name": name, "data": mindspore.Tensor(part)})
    (tmp_path / "cut/strategy").mkdir(parents=True)
    strategy = tmp_path / "cut/strategy/ckpt_strategy.ckpt"
    strategy.write_bytes(told.SerializeToString())
    for rank, parameters in enumerate(ranks):
        (tmp_path / f"cut/rank_{rank}").mkdir()
        mindspore.save_checkpoint(parameters, str(tmp_path / f"cut/rank_{rank}/net.ckpt"))
    mindspore.transform_checkpoints(str(tmp_path / "cut"), str(tmp_path / "joined"), "net", str(strategy), None)
    theirs = mindspore.load_checkpoint(str(next((tmp_path / "joined").rglob("*.ckpt"))))
    mindspore.save_checkpoint(
        [{"name": n, "data": mindspore.Tensor(a)} for n, a in whole.items()], str(tmp_path / "whole.ckpt")
    )
    ours = open_checkpoint(tmp_path / "cut")
    assert ours.problems == () and ours.notes == ()
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {name: cut[0] for name, cut in CUTS.items()}
    for name, array in whole.items():
        assert np.array_equal(theirs[name].asnumpy(), array), name
    assert main(["ckpt-compare", str(tmp_path / "cut"), str(tmp_path / "whole.ckpt")]) == 0
    strategy.write_bytes(b"no strategy")
    damaged = open_checkpoint(tmp_path / "cut")
    assert "is no strategy file of MindSpore" in damaged.problems[0].message
    assert "rank_0.same.bias" in damaged.tensors
