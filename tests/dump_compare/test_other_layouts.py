"""One model, split differently over ranks: healthy pairs agree, and what is planted in one rank is named first."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.distributed.launch import launch
from tests.dump_compare import train_layouts
from trainprobe.cli import main
from trainprobe.dump_compare.dump_side import Columns, gathered
from trainprobe.dump_compare.layouts.joined import JoinedSide, RankPart
from trainprobe.dump_compare.layouts.splits import joins
from trainprobe.engine.core.records import Value
from trainprobe.engine.stats.checksum import fingerprint
from trainprobe.engine.storage.dumps import read

HEALTHY = ["ddp", "fsdp1", "fsdp2", "tensor", "context"]
FOUR_RANKS = ["hsdp"]
DEEPSPEED = ["zero1", "zero2", "zero3"]  # these count steps from 1
WEIGHT = "Parameter.layers.1.down.weight (step 0)"
COPY = "in B, rank 1 holds another copy than rank 0"
PLANTED = {
    "fsdp1:shard": (WEIGHT, "the weights differ"),
    "context:weight": (WEIGHT, COPY),
    "context:gradients": (".grad (step 0)", COPY),
    "ddp:scale": (".grad (step 0)", "all that it is given agrees, grad is twice as large in B"),
    "tensor:column": ("Module.layers.1.up.Linear.parameters_grad.0 (step 0, micro-batch 0)", "weight is at least"),
    "ddp:weight": (WEIGHT, COPY),
    "fsdp2:shard": (WEIGHT, "the weights differ"),
    "tensor:shard": (WEIGHT, "the weights differ"),
    "tensor:reduce": ("Module.layers.1.down.Linear.forward.0 (step 0", f"output: {COPY}"),
    "ddp:gradients": (".grad (step 0)", COPY),
    "fsdp2:swap": (WEIGHT, "the weights differ, parameters.weight: the bits differ, the statistics do not"),
    "tensor:swap": (WEIGHT, "the weights differ, parameters.weight: the bits differ, the statistics do not"),
}
FLIPPED = ["fsdp1:flip", "fsdp2:flip", "tensor:flip"]
IN_FUSED = {
    "tensor:key weight": ("Parameter.layers.1.qkv.weight, Parameter.layers.1.q+k+v.weight in B,", "the weights differ"),
    "tensor:key": ("Module.layers.1.qkv.Linear.forward.0, Module.layers.1.q+k+v.Linear.forward.0 in B,", "output is at least"),
    "ddp:key gradient": ("layers.1.q+k+v", "weight"),
    "ddp:key": ("Module.layers.1.qkv.Linear.forward.0", "output is at least"),
}
WITH_TENSORS = ("ddp", "fsdp2", "tensor")
FOUR_PLANTED = {"hsdp:shard": (WEIGHT, "in B, rank 3 holds another copy than rank 1")}
DEEPSPEED_PLANTED = {
    "zero1:weight": (WEIGHT, COPY),
    "zero2:weight": (WEIGHT, COPY),
    "zero3:shard": (WEIGHT, "the weights differ"),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    train_layouts.train(folder / "alone")
    train_layouts.train(folder / "fused", "fused")
    train_layouts.train(folder / "fused+tensors", "fused", level="tensors")
    script = train_layouts.__file__
    stored = [f"{layout}+tensors{fault}" for layout in WITH_TENSORS for fault in ("", ":key rows")]
    launch(script, 2, str(folder), *HEALTHY, *PLANTED, *FLIPPED, *IN_FUSED, *stored, timeout=300)
    launch(script, 4, str(folder), *FOUR_RANKS, *FOUR_PLANTED, timeout=300)
    return folder


@pytest.fixture(scope="module")
def deepspeed_dumps(dumps, require) -> Path:
    require("deepspeed")
    launch(train_layouts.__file__, 2, str(dumps), *DEEPSPEED, *DEEPSPEED_PLANTED, timeout=300)
    return dumps


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("layout", [*HEALTHY, *FOUR_RANKS])
def test_one_projection_belongs_to_three_that_ranks_split(dumps, capsys, layout, swapped):
    """Results, weights, their gradients before and after the reduction: whatever way the ranks hold the three."""
    sides = (layout, "fused") if swapped else ("fused", layout)
    code, said, found = compared(dumps, *sides, capsys)
    assert code == 1, said
    fused = [call for call in found["calls"] if ".q+k+v." in f"{call['a']} {call['b']}"]
    assert {call["verdict"] for call in fused} <= {"identical", "rounding", "carried"}, said
    kinds = {call["a"].partition(".")[0] for call in fused}
    assert kinds == {"Module", "Parameter"}
    slots = {value["slot"] for call in fused for value in call["values"]}
    assert slots >= {"input.0", "output", "grad_output.0", "grad", "parameters.weight", "parameters.bias"}, slots
    assert "missing" not in said and "alone" not in said, said


@pytest.mark.parametrize("fault", IN_FUSED)
def test_what_one_rank_does_to_one_of_three_is_named(dumps, capsys, fault):
    code, said, _ = compared(dumps, "fused", fault, capsys)
    assert code == 2, said
    for words in IN_FUSED[fault]:
        assert words in said.splitlines()[0], said


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("layout", WITH_TENSORS)
def test_stored_rows_of_one_projection_are_compared_element_by_element(dumps, capsys, layout, swapped):
    sides = ("fused+tensors", f"{layout}+tensors")
    code, said, _ = compared(dumps, *(sides[::-1] if swapped else sides), capsys)
    assert code == 1, said
    assert "how the rows of several modules lie in the one that they are is known" in said


@pytest.mark.parametrize("layout", WITH_TENSORS)
def test_rows_that_changed_places_are_told_though_statistics_are_the_same(dumps, capsys, layout):
    code, said, found = compared(dumps, "fused+tensors", f"{layout}+tensors:key rows", capsys)
    assert code == 2, said
    assert "layers.1.q+k+v" in said.splitlines()[0], said
    values = [value for value in found["first"]["values"] if value["low"]]
    assert any(re.search(r"in another order, most at \[(1|2|17|18), \d+\] of k", value["note"]) for value in values), values


LACKING = {
    "the one": ("fused", "qkv", "values in B alone: 3; the first is bias of layers.1.q (gradients of its weights)"),
    "one of three": ("ddp", "k", "values in A alone: 1; the first is bias of layers.1.qkv (gradients of its weights)"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_a_value_that_one_or_the_several_lack_is_told(dumps, tmp_path, capsys, lacking):
    name, module, said_of_it = LACKING[lacking]
    changed = shutil.copytree(dumps / name, tmp_path / name)
    for path in changed.glob("step*/rank*/dump.json"):
        top = json.loads(path.read_text())
        for entry, values in top["data"].items():
            if entry.startswith(f"Module.layers.1.{module}.") and ".parameters_grad." in entry:
                del values["bias"]
        path.write_text(json.dumps(top))
    code = main(["dump-compare", *(str(changed if side == name else dumps / side) for side in ("fused", "ddp"))])
    said = capsys.readouterr().out
    assert code == 3, said
    assert said_of_it in said, said


OTHER_NAMES = {"layers": "blocks", "embed": "words", "head": "logits", "up": "widen", "down": "narrow", "act": "bend"}


def other_name(name: str | None) -> str | None:
    return name and ".".join(OTHER_NAMES.get(part, part) for part in name.split("."))


@pytest.fixture(scope="module")
def renamed(dumps) -> Path:
    """The dump of one process as if its modules had other names."""
    for path in [*shutil.copytree(dumps / "alone", dumps / "renamed").rglob("*.json")]:
        top = json.loads(path.read_text())
        if path.name == "dump.json":
            top["data"] = {other_name(name): entry for name, entry in top["data"].items()}
            states = top["trainprobe"]["states"]
            top["trainprobe"]["states"] = [[other_name(name), *rest] for name, *rest in states]
        elif path.name == "construct.json":
            top = {other_name(name): other_name(parent) for name, parent in top.items()}
        path.write_text(json.dumps(top))
    return dumps / "renamed"


def compared(dumps: Path, a: str, b: str, capsys) -> tuple[int, str, dict]:
    code = main(["dump-compare", str(dumps / a), str(dumps / b), "--json", str(dumps / "all.json")])
    return code, capsys.readouterr().out, json.loads((dumps / "all.json").read_text())


@pytest.mark.parametrize("layout", [*HEALTHY, *FOUR_RANKS])
def test_modules_of_other_names_are_paired_across_layouts(dumps, renamed, capsys, layout):
    code, said, found = compared(dumps, "renamed", layout, capsys)
    assert code == 1, said
    assert "have other names in B and were paired by structure" in said
    pairs = {call["a"]: (call["b"].replace(".FSDP", "."), call["paired_by"]) for call in found["calls"]}
    assert pairs["Module.blocks.1.widen.Linear.forward.0"] == ("Module.layers.1.up.Linear.forward.0", "equal weights")
    assert pairs["Module.blocks.1.bend.GELU.forward.0"] == ("Module.layers.1.act.GELU.forward.0", "order of calls and shapes")
    assert pairs["Module.blocks.1.Block.forward.0"] == ("Module.layers.1.Block.forward.0", "what it calls")
    alone = {call["a"] for call in compared(dumps, "alone", layout, capsys)[2]["calls"]}
    assert {*pairs} == {other_name(name) for name in alone}


@pytest.mark.parametrize("planted", ["tensor:column", "tensor:reduce", "fsdp2:shard", "ddp:scale"])
def test_what_is_planted_is_named_with_both_names(dumps, renamed, capsys, planted):
    code, said, _ = compared(dumps, "renamed", planted, capsys)
    first, place = said.splitlines()[0], PLANTED[planted][0].partition(" (")[0]
    assert code == 2, said
    assert other_name(place) in first, first


@pytest.mark.parametrize("layout", [*HEALTHY, *FOUR_RANKS])
def test_a_healthy_layout_agrees_with_one_process_within_rounding(dumps, capsys, layout):
    code, said, found = compared(dumps, "alone", layout, capsys)
    assert code == 1, said
    verdicts = {call["verdict"] for call in found["calls"]}
    assert verdicts <= {"identical", "rounding", "carried"}
    names = {call["a"] for call in found["calls"]}
    modules = {"Module.layers.1.down.Linear.forward.0", "Module.layers.1.down.Linear.backward.0"}
    assert modules | {"Parameter.layers.1.down.weight", "Parameter.layers.1.down.weight.grad"} <= names


def told_of_states(found: dict, step: int) -> dict[str, tuple[str, float]]:
    """Weight or gradient → what told how far it is apart, and the upper end of that."""
    states = [call for call in found["calls"] if call["a"].startswith("Parameter.") and call["step"] == step]
    values = [(call["a"], value) for call in states for value in call["values"]]
    before = [(name, value) for name, value in values if value["slot"].startswith(("parameters.", "grad"))]
    return {name: (value["evidence"], value["high"]) for name, value in before}


@pytest.mark.parametrize("layout", [*HEALTHY, *FOUR_RANKS])
def test_weights_that_layouts_begin_with_are_the_same_bits(dumps, capsys, layout):
    told = told_of_states(compared(dumps, "alone", layout, capsys)[2], 0)
    weights = {name: evidence for name, evidence in told.items() if not name.endswith(".grad")}
    assert len(weights) == len(list(train_layouts.Gpt().parameters()))
    assert set(weights.values()) == {("bits", 0.0)}
    reduced = {name: evidence for name, evidence in told.items() if name.endswith(".grad")}
    assert len(reduced) == len(weights) and ("statistics", 0.0) not in reduced.values(), reduced  # the same bits, or apart


def test_two_sharded_layouts_hold_the_same_bits(dumps, capsys):
    told = told_of_states(compared(dumps, "fsdp2", "tensor", capsys)[2], 0)
    assert {evidence for name, evidence in told.items() if not name.endswith(".grad")} == {("bits", 0.0)}


@pytest.mark.parametrize("layout", FLIPPED)
def test_one_bit_of_one_shard_is_no_longer_the_same_bits(dumps, capsys, layout):
    code, said, found = compared(dumps, "alone", layout, capsys)
    assert code == 2 and "the weights differ" in said, said  # before the first step: other weights, however near
    told = told_of_states(found, 0)
    changed = [name for name, evidence in told.items() if not name.endswith(".grad") and evidence != ("bits", 0.0)]
    assert changed == ["Parameter.layers.1.down.weight"] and told[changed[0]][1] > 0
    before, behind = (call["verdict"] for call in found["calls"] if call["a"] == changed[0] and call["step"] == 0)
    assert before != "identical" and behind != "identical"  # at the beginning of the step, and what the optimizer makes of it


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "tensor"])
def test_shares_add_up_to_the_fingerprint_of_the_concatenated_tensor(dumps, layout):
    torch.manual_seed(0)
    wholes = {name: fingerprint(p.detach().numpy()) for name, p in train_layouts.Gpt().named_parameters()}
    added: dict[str, int] = Counter()
    for rank in range(2):
        for call in read(dumps / layout / "step0" / f"rank{rank}").states:
            value = (call.params or {}).get("value")
            if value is not None and (value.extra or {}).get("share"):
                added[call.name] += int(value.extra["share"], 16)
    assert {name: total % 2**64 for name, total in added.items()} == {name: wholes[name] for name in added}
    assert len(added) >= 3 and "layers.1.up.weight" in added


def test_dumps_without_shares_are_compared_by_statistics(dumps, capsys):
    """As older versions wrote them: nothing is said of the bits, and nothing is called different."""
    older = shutil.copytree(dumps / "fsdp2", dumps / "older")
    for path in older.rglob("dump.json"):
        path.write_text(re.sub(r', "share": "[0-9a-f]{16}"', "", path.read_text()))
    code, said, found = compared(dumps, "alone", "older", capsys)
    assert code == 1, said
    told = told_of_states(found, 0)
    assert ("bits", 0.0) not in told.values() and ("statistics", 0.0) in told.values()
    assert "agree as far as statistics tell, which do not see elements in another order" in said, said


def test_two_layouts_of_two_ranks_agree(dumps, capsys):
    code, said, _ = compared(dumps, "fsdp2", "tensor", capsys)
    assert code == 1, said
    assert "A is DP2 and B is TP2" in said


@pytest.mark.frameworks
@pytest.mark.parametrize("layout", DEEPSPEED)
def test_zero_agrees_with_one_process_within_rounding(deepspeed_dumps, capsys, layout):
    code, said, found = compared(deepspeed_dumps, "alone/step0", f"{layout}/step1", capsys)
    assert code == 1, said
    told = {name: evidence for name, evidence in told_of_states(found, 0).items() if not name.endswith(".grad")}
    assert set(told.values()) == {("bits", 0.0)}, told
    assert {call["verdict"] for call in found["calls"]} <= {"identical", "rounding", "carried"}
    assert {"Parameter.layers.1.down.weight", "Parameter.layers.1.down.weight.grad"} <= {call["a"] for call in found["calls"]}


@pytest.mark.frameworks
@pytest.mark.parametrize("layout", DEEPSPEED_PLANTED)
def test_a_weight_that_one_rank_of_zero_lost_is_named_first(deepspeed_dumps, capsys, layout):
    code, said, _ = compared(deepspeed_dumps, "alone/step0", f"{layout}/step1", capsys)
    assert code == 2
    assert all(words in said.splitlines()[0] for words in DEEPSPEED_PLANTED[layout]), said


def test_one_rank_of_another_layout_is_no_whole(dumps, capsys):
    assert main(["dump-compare", str(dumps / "alone/step0/rank0"), str(dumps / "tensor/step0/rank0")]) == 3
    assert "B holds step 0 of 1 of its 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("layout", [*PLANTED, *FOUR_PLANTED])
def test_what_is_planted_in_one_rank_is_named_first(dumps, capsys, layout):
    where, what = {**PLANTED, **FOUR_PLANTED}[layout]
    code, said, _ = compared(dumps, "alone", layout, capsys)
    assert code == 2
    first = said.splitlines()[0]
    assert where in first, said
    assert what in first, said


def test_a_layout_is_compared_with_itself_rank_by_rank(dumps, capsys):
    code, said, found = compared(dumps, "ddp", "ddp", capsys)
    assert code == 0, said
    assert {call["rank"] for call in found["calls"]} == {0, 1}


def test_a_dump_says_which_part_of_each_parameter_its_rank_holds(dumps):
    for rank in (0, 1):
        (held,) = [
            call
            for call in read(dumps / f"fsdp2/step0/rank{rank}").states
            if call.name == "head.weight" and call.node == "before_step"
        ]
        assert held.params["value"].extra["shard"] == {
            "offset": [25 * rank, 0],
            "shape": [25, 32],
            "whole": [50, 32],
            "replicas": [],
        }
        assert dict(read(dumps / f"tensor/step0/rank{rank}").place.axes) == {"tp": (rank, 2)}


def test_terms_that_are_shards_add_up_to_the_mean_of_the_whole():
    """A weight that two pipeline stages share, split over two tensor-parallel ranks: two terms of two shards each."""
    rng = np.random.default_rng(0)
    terms = rng.normal(size=(2, 6, 4))
    halves = [(stage, rank, np.split(term, 2)[rank]) for stage, term in enumerate(terms) for rank in (0, 1)]
    parts = [
        RankPart(_Known(half), Value(0, "torch.float64", half.shape), rank, (0, stage), rank) for stage, rank, half in halves
    ]
    whole = terms.sum(0)
    alone = [RankPart(_Known(whole), Value(0, "torch.float64", whole.shape), 0, (0, 0))]
    made = joins(alone, parts, "weight gradient")
    assert made is not None
    assert made[1].how == "terms"
    side = JoinedSide("B", [parts[0].side])
    assert side.numbers(side.add(made[1])) == {"mean": pytest.approx(whole.mean())}


@dataclass
class _Known:
    """A rank that holds one array."""

    elements: np.ndarray
    adds_up: bool = False
    folder: Path = Path("step0/rank0")
    step_data: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(step=0, place=None, framework="", level="", task="", partials=np.zeros((0, 1)))
    )

    has_copies: ClassVar[bool] = False

    def columns(self, values: Sequence[Value]) -> Columns:
        return gathered(self, values)

    def numbers(self, value: Value) -> dict[str, float]:
        x = self.elements
        return {"max": x.max(), "min": x.min(), "mean": x.mean(), "norm": float(np.linalg.norm(x))}

    def bits(self, value: Value) -> dict[str, int]:
        return {}

    def array(self, value: Value) -> None:
        return None

    def disagreement(self, value: Value) -> None:
        return None
