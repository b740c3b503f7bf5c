"""Megatron's tensor-parallel ranks against one process, op by op: what is proven is compared, and a rank's fault is named."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import orjson
import pytest

from tests.distributed.launch import launch
from trainprobe.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]
SCRIPT = Path(__file__).with_name("train_megatron_ops.py")
# of each of four layers in each of four micro-batches, with what TP2 runs beside them
OF_A_LAYER = {
    "Torch.matmul": 4,  # qkv and fc1, of which each rank has columns; the projections, of which each has a term
    "Torch.baddbmm": 1,
    "Torch.bmm": 1,
    "Functional.softmax": 1,
    "Functional.silu": 1,
    "Torch.split": 1,
    "Tensor.permute": 1,
    "Tensor.masked_fill_": 1,
    "Tensor.repeat_interleave": 2,
}


@pytest.fixture(scope="module")
def folder(require, tmp_path_factory) -> Path:
    require("megatron.core")
    folder = tmp_path_factory.mktemp("megatron ops")
    launch(SCRIPT, 1, str(folder), "alone")
    launch(SCRIPT, 2, str(folder), "tp2 selective", "tp2 selective!scale")
    return folder


def compared(folder: Path, layout: str, capsys) -> tuple[int, str, list[dict]]:
    code = main(["dump-compare", str(folder / "alone"), str(folder / layout), "--json", str(folder / "all.json")])
    return code, capsys.readouterr().out, orjson.loads((folder / "all.json").read_bytes())["calls"]


def test_operators_of_tensor_parallel_ranks_agree_with_those_of_one_process(folder, capsys):
    code, said, calls = compared(folder, "tp2 selective", capsys)
    assert code == 1, said
    assert {call["verdict"] for call in calls} <= {"identical", "rounding", "carried"}, said
    counts = Counter(call["a"].rpartition(".forward")[0].rpartition(".")[0] for call in calls if ".forward" in call["a"])
    assert {name: counts[name] // 16 for name in OF_A_LAYER} == OF_A_LAYER
    left = [int(count) for count in re.findall(r"• (\d+) calls of operators", said)]
    assert sum(left) < 1400 < 2200 < sum(call["a"].startswith(("Torch", "Tensor", "Functional")) for call in calls), said


def test_an_argument_that_one_rank_alone_is_given_is_named_first(folder, capsys):
    code, said, _ = compared(folder, "tp2 selective!scale", capsys)
    assert code == 2, said
    first = said.splitlines()[0]
    assert "Torch.baddbmm.1.forward (step 0, micro-batch 0)" in first, said
    assert re.search(r"alpha is 0\.35\d* in A and 0\.36\d* on rank 1 in B", first), said
