"""A tensor-parallel pair of linear layers on two ranks under msrun, against the same training on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mindspore.train import node_strategy_pb2

from tests.distributed.launch import free_port
from tests.mindspore.launch import msrun, run
from trainprobe.cli import main

SPLITS = """
rules:
- {module: "*.reduce", slot: "input*", tp: sum}
- {class: ColumnParallelLinear, slot: "grad_input*", tp: sum}
- {module: spread, slot: "grad_output*", tp: sum}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return the folder, what the one rank printed, and (name, rank) → what each of the two did."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    one = run("run_tensor_parallel", str(folder / "one"), "1", cwd=folder)
    logs = msrun("run_tensor_parallel", str(folder / "two"), "2", workers=2, port=free_port(), cwd=folder)
    rows = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"rank"')]
    two = {f"{row['name']} {row['rank']}": row for row in rows}
    assert len(two) == 6
    return folder, one, two


def compared(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    (folder / "splits.yaml").write_text(SPLITS)
    words = ["dump-compare", str(folder / "one/healthy"), str(folder / "two" / name), "--layout", str(folder / "splits.yaml")]
    code = main([*words, "--json", str(folder / "all.json")])
    return code, capsys.readouterr().out


@pytest.mark.proves("MindSpore", "tensor parallel under msrun", ranks=2)
def test_two_ranks_agree_with_one_within_rounding_and_the_audit_is_quiet(trained: Any, capsys: Any) -> None:
    folder, one, two = trained
    for rank in (0, 1):
        assert two[f"healthy {rank}"]["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert two[f"healthy {rank}"]["findings"] == []
    code, out = compared(folder, "healthy", capsys)
    assert code == 1 and out.startswith("what both dumps hold agrees within rounding"), out
    assert "B is TP2" in out
    called = {row["b"]: row["verdict"] for row in json.loads((folder / "all.json").read_text())["calls"]}
    for name in ("up.weight", "up.bias", "down.weight", "first.weight"):
        assert called[f"Parameter.{name}.grad"] in ("identical", "rounding"), name
    assert {"Cell.up.ColumnParallelLinear.parameters_grad.0", "Cell.down.RowParallelLinear.forward.0"} <= set(called)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("gradient", ("Parameter.up.weight.grad", "step 0")),
        ("no_reduce", ("Cell.down.reduce.Summed.forward.0", "rank 1 holds another copy")),
    ],
)
def test_what_is_planted_on_one_rank_is_named_first(planted: str, words: tuple[str, ...], trained: Any, capsys: Any) -> None:
    code, out = compared(trained[0], planted, capsys)
    assert code == 2
    assert all(word in out.splitlines()[0] for word in words), out[:600]


def test_checkpoints_of_the_two_ranks_are_joined_into_that_of_one(trained: Any, capsys: Any) -> None:
    """MindSpore writes no strategy file of a training by hand: this one is written by its own protocol."""
    folder = trained[0] / "two/healthy_weights"
    told = node_strategy_pb2.ParallelStrategyMap(current_stage=0)
    cuts = {"up.weight": (0, -1), "up.bias": (0,), "down.weight": (-1, 0), "first.weight": (-1, -1), "first.bias": (-1,)}
    for name, axes in cuts.items():
        layouts = told.parallel_layout_item.add(param_name=name).parallel_layouts
        layouts.dev_matrix.add(dim=(2,))
        layouts.tensor_map.add(dim=axes)
        layouts.param_split_shape.add(dim=[])
        layouts.indices_offset.add(dim=[])
        layouts.field = layouts.opt_weight_shard_step = layouts.opt_weight_shard_size = 0
    (folder / "strategy").mkdir()
    (folder / "strategy/ckpt_strategy.ckpt").write_bytes(told.SerializeToString())
    whole = trained[0] / "one/healthy_weights/rank_0/net.ckpt"
    assert main(["ckpt-compare", str(whole), str(folder), "--rtol", "1e-6"]) == 1, capsys.readouterr().out
