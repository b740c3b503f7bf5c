"""Checkpoints that MindSpore writes here and now, compared with each other and with what MindSpore itself reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import mindspore
import numpy as np
import pytest
from mindspore import nn
from mindspore.parallel import transform_safetensors
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


# parameter → (whole shape, axes of each dimension from the right, step and size of the optimizer's cut) on devices (2, 2)
Cut = tuple[tuple[int, ...], tuple[Any, ...], int, int]
FLAT: dict[str, Cut] = {
    "column.weight": ((8, 6), (0, -1), 0, 0),
    "row.weight": ((4, 8), (-1, 0), 0, 0),
    "norm.gamma": ((8,), (-1,), 1, 4),
    "both.weight": ((8, 6), (0, -1), 2, 2),
    "same.bias": ((3,), (-1,), 0, 0),
    "grid.weight": ((4, 6), (1, 0), 0, 0),
    "over.weight": ((8, 6), (1, -1), 1, -1),
}
# one dimension that two axes cut, in either order
NESTED: dict[str, Cut] = {
    "vocabulary.weight": ((8, 6), ((1, 0), (-1,)), 0, 0),
    "turned.weight": ((6, 8), ((-1,), (0, 1)), 0, 0),
    "rest.weight": ((8, 6), ((0,), (-1,)), 2, 2),
}
DEVICES = (2, 2)


def parts(whole: Any, cut: Cut) -> list[Any]:
    """Return the part that each of four ranks has."""
    _, axes, _, size = cut
    found: list[Any] = []
    for rank in range(4):
        at, part, left = (rank // 2, rank % 2), whole, [0, 1]
        for dimension, along in enumerate(axes):
            for axis in along if isinstance(along, tuple) else (along,):
                if axis >= 0:
                    part = np.split(part, 2, dimension)[at[1 - axis]]
                    left.remove(1 - axis)
        for axis in left if size else ():
            part = np.split(part, 2, 0)[at[axis]]
        found.append(part)
    return found


def strategy(cuts: dict[str, Cut], stage: int = 0) -> Any:
    """Return a strategy file in MindSpore's own protocol."""
    told = node_strategy_pb2.ParallelStrategyMap(current_stage=stage)
    operator = told.parallel_strategy_item.add(node_name=f"MatMul-op{stage}").parallel_strategys
    operator.stage = stage
    operator.parallel_strategy.add(dim=[1, 1])
    for name, (_, axes, step, size) in cuts.items():
        layouts = told.parallel_layout_item.add(param_name=name).parallel_layouts
        layouts.dev_matrix.add(dim=DEVICES)
        for one in axes if isinstance(axes[0], tuple) else (axes,):
            layouts.tensor_map.add(dim=one)
        layouts.param_split_shape.add(dim=[])
        layouts.indices_offset.add(dim=[])
        layouts.field, layouts.opt_weight_shard_step, layouts.opt_weight_shard_size = 0, step, size
    return told


def as_json(told: Any) -> str:
    """Return what MindSpore keeps in a strategy file whose name ends in `.json`."""
    items = {
        item.param_name: {
            "dev_matrix": [*item.parallel_layouts.dev_matrix[0].dim],
            "tensor_map": [*item.parallel_layouts.tensor_map[0].dim],
            "field": 0,
            "opt_weight_shard_step": item.parallel_layouts.opt_weight_shard_step,
            "opt_weight_shard_size": item.parallel_layouts.opt_weight_shard_size,
        }
        for item in told.parallel_layout_item
    }
    operators = {
        one.node_name: {"stage": one.parallel_strategys.stage, "parallel_strategy": [[1, 1]]}
        for one in told.parallel_strategy_item
    }
    return json.dumps({"current_stage": 0, "parallel_strategy_item": operators, "parallel_layout_item": items})


def drawn(cuts: dict[str, Cut]) -> dict[str, Any]:
    return {name: np.random.default_rng(len(name)).standard_normal(cut[0]).astype(np.float32) for name, cut in cuts.items()}


def saved(folder: Path, stages: list[dict[str, Cut]], kind: str) -> tuple[Path, dict[str, Any]]:
    """Save all ranks, and their strategy, which MindSpore merges of several stages; return its file, and the whole."""
    whole: dict[str, Any] = {}
    (folder / "strategy").mkdir(parents=True)
    (folder / "stages").mkdir()
    for stage, cuts in enumerate(stages):
        arrays = drawn(cuts)
        whole |= arrays
        for rank in range(4):
            held = folder / f"rank_{stage * 4 + rank}"
            held.mkdir()
            of_rank = [{"name": n, "data": mindspore.Tensor(parts(arrays[n], cuts[n])[rank])} for n in cuts]
            mindspore.save_checkpoint(of_rank, str(held / "net.ckpt"))
        told = strategy(cuts, stage)
        file = folder / "stages" / f"stage{stage}.{kind}"
        file.write_bytes(told.SerializeToString() if kind == "ckpt" else as_json(told).encode())
    merged = folder / "strategy" / f"ckpt_strategy.{kind}"
    if len(stages) > 1:
        mindspore.merge_pipeline_strategys(str(folder / "stages"), str(merged))
    else:
        merged.write_bytes((folder / "stages" / f"stage0.{kind}").read_bytes())
    shutil.rmtree(folder / "stages")
    return merged, whole


CASES: dict[str, tuple[list[dict[str, Cut]], str]] = {
    "flat": ([FLAT], "ckpt"),
    "flat in JSON": ([FLAT], "json"),
    "several axes for one dimension": ([NESTED], "ckpt"),
    "two stages": ([{"first." + n: c for n, c in FLAT.items()}, {"last." + n: c for n, c in FLAT.items()}], "ckpt"),
    "two stages in JSON": ([{"first." + n: c for n, c in FLAT.items()}, {"last." + n: c for n, c in FLAT.items()}], "json"),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_ranks_are_joined_as_mindspore_joins_them(tmp_path: Path, case: str) -> None:
    """The strategy file is written by MindSpore's own protocol; the oracle is its `transform_checkpoints`."""
    stages, kind = CASES[case]
    file, whole = saved(tmp_path / "cut", stages, kind)
    mindspore.transform_checkpoints(str(tmp_path / "cut"), str(tmp_path / "joined"), "net", str(file), None)
    theirs = mindspore.load_checkpoint(str(next((tmp_path / "joined").rglob("*.ckpt"))))
    mindspore.save_checkpoint(
        [{"name": n, "data": mindspore.Tensor(a)} for n, a in whole.items()], str(tmp_path / "whole.ckpt")
    )
    ours = open_checkpoint(tmp_path / "cut")
    assert ours.problems == () and ours.notes == ()
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {name: array.shape for name, array in whole.items()}
    for name, array in whole.items():
        assert np.array_equal(theirs[name].asnumpy(), array), name
    assert main(["ckpt-compare", str(tmp_path / "cut"), str(tmp_path / "whole.ckpt")]) == 0
    file.write_bytes(b"no strategy")
    damaged = open_checkpoint(tmp_path / "cut")
    assert "strategy" in damaged.problems[0].where
    assert any(name.startswith("rank_0.") for name in damaged.tensors)


def test_what_mindspore_has_joined_into_several_files_is_read_whole(tmp_path: Path) -> None:
    """`unified_safetensors` joins the ranks into `part0.safetensors`, `part1.safetensors`, … and names what is where."""
    whole = drawn(FLAT)
    for rank in range(4):
        held = [{"name": n, "data": mindspore.Tensor(parts(whole[n], FLAT[n])[rank])} for n in FLAT]
        (tmp_path / f"cut/rank_{rank}").mkdir(parents=True)
        mindspore.save_checkpoint(held, str(tmp_path / f"cut/rank_{rank}/net"), format="safetensors")
    file = tmp_path / "strategy.ckpt"
    file.write_bytes(strategy(FLAT).SerializeToString())
    with mock.patch.object(transform_safetensors.math, "ceil", lambda size: 3):  # files of 3 GB are three files of bytes
        mindspore.unified_safetensors(str(tmp_path / "cut"), str(file), str(tmp_path / "joined"))
    assert len([*(tmp_path / "joined").glob("part*.safetensors")]) == 3
    found = open_checkpoint(tmp_path / "joined")
    assert found.problems == ()
    assert sorted(found.tensors) == sorted(whole)
    for name, array in whole.items():
        assert np.array_equal(found.tensors[name].pieces[0].source.load().view(np.float32), array), name
    next((tmp_path / "joined").glob("part1.safetensors")).unlink()
    assert "part1.safetensors" in open_checkpoint(tmp_path / "joined").problems[0].where
