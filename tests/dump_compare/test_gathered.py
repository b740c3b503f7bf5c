"""Gathers, exchanges and functional collectives of parallelism that is written by hand, and of torch's and DeepSpeed's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.dump_compare import train_gathered, train_styles
from trainprobe.cli import main
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.layouts.collectives import COPIES, Collectives
from trainprobe.dump_compare.layouts.joined import RankPart
from trainprobe.engine.core.step_data import slots

KINDS = ["gathered", "vocab", "functional", "sequence", "ulysses", "exchanged"]
PLANS = [f"{level}-{kept}" for level in ("mix", "L1") for kept in train_gathered.PLANS]
ATTENTION = "Functional.scaled_dot_product_attention.1.forward"
LOSS = "Functional.cross_entropy.0.forward"
PLANTED = {
    "gathered+mix-statistics:order": (LOSS, "output is at least"),
    "gathered+mix-both:order": (LOSS, "output is at least"),
    "gathered+mix-tensor:order": ("Tensor.flatten.2.forward", "input.0 is 1."),
    "gathered+L1-both:order": (LOSS, "output is at least"),
    "gathered+L1-tensor:order": ("Tensor.flatten.2.forward", "input.0 is 1."),
    "functional+mix-both:order": (LOSS, "output is at least"),
    "functional+mix-tensor:order": ("Tensor.flatten.2.forward", "input.0 is 1."),
    "gathered+mix-both:split": ("Module.blocks.1.up.Linear.forward.0", "the weights differ"),
    "gathered+L1-statistics:split": ("Functional.linear.10.forward", "input.1 is at least"),
    "gathered+L1-tensor:split": ("Functional.linear.10.forward", "input.1 is "),
    "gathered+mix-tensor:rows": ("Module.head.Linear.forward.0", "output is "),
    "gathered+mix-statistics:missing": ("Module.root.Model.forward.0", "output is at least"),
    "gathered+mix-tensor:missing": ("Module.root.Model.forward.0", "output is "),
    "ulysses+mix-statistics:heads": (ATTENTION, "output is at least"),
    "ulysses+mix-tensor:heads": (ATTENTION, "output is at least"),
    "ulysses+L1-both:heads": (ATTENTION, "output is at least"),
    "ulysses+mix-both:order": (ATTENTION, "output is at least"),
    "exchanged+mix-tensor:order": (ATTENTION, "output is at least"),
    "exchanged+L1-statistics:order": (ATTENTION, "output is at least"),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gathered")
    for plan in PLANS:
        train_gathered.train(folder / f"alone+{plan}", plan=plan)
    healthy = [f"{kind}+{plan}" for kind in KINDS for plan in PLANS]
    launch(train_gathered.__file__, 2, str(folder), *healthy, *PLANTED, timeout=400)
    return folder


def compared(folder: Path, layout: str, capsys) -> tuple[int, str, list[dict]]:
    plan = layout.partition(":")[0].partition("+")[2]
    code = main(["dump-compare", str(folder / f"alone+{plan}"), str(folder / layout), "--json", str(folder / "all.json")])
    return code, capsys.readouterr().out, json.loads((folder / "all.json").read_text())["calls"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_layout_agrees_within_rounding(dumps, capsys, kind, plan):
    code, said, calls = compared(dumps, f"{kind}+{plan}", capsys)
    assert code == 1, said
    assert {call["verdict"] for call in calls} <= {"identical", "rounding", "carried"}
    names = {call["a"] for call in calls}
    assert {ATTENTION, "Functional.gelu.1.forward", "Tensor.add.3.forward"} <= names, said
    assert LOSS in names or kind in ("vocab", "ulysses", "exchanged"), said  # given what was gathered


@pytest.mark.parametrize("layout", PLANTED)
def test_what_is_planted_is_named_first(dumps, capsys, layout):
    code, said, _ = compared(dumps, layout, capsys)
    assert code == 2, said
    assert all(words in said.splitlines()[0] for words in PLANTED[layout]), said


def test_parts_that_are_gathered_are_joined_element_by_element(dumps, capsys):
    _, _, calls = compared(dumps, "gathered+mix-tensor", capsys)
    head = next(call for call in calls if call["a"] == "Module.head.Linear.forward.0")
    assert {value["slot"]: value["evidence"] for value in head["values"]}["output"] == "values"


@pytest.mark.parametrize("change", [None, "group", "order", "numbers"])
def test_only_a_gather_of_this_value_over_these_ranks_proves_an_order(dumps, tmp_path, change):
    """Over another group, or of other numbers, it proves nothing; in another order of ranks, no more than parts."""
    folder = dumps / "gathered+mix-both" / "step0"
    group = {"group": "[0]", "order": "[1, 0]"}.get(change or "", "[0, 1]")
    for path in folder.rglob("*.json"):
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(re.sub(r'("group_ranks": ?)\[0, ?1\]', rf"\g<1>{group}", path.read_text()))
    ranks = [Side(tmp_path / f"rank{rank}") for rank in range(2)]
    alone = Side(next((dumps / "alone+mix-both" / "step0").iterdir()))
    name = "blocks.1.act" if change == "numbers" else "head"

    def output(side: Side) -> RankPart:
        calls = [c for c in side.step_data.calls if c.kind == "module" and c.name == name and c.phase == "forward"]
        place = side.step_data.place
        return RankPart(side, dict(slots(calls[0]))["output"], place.rank, (0,), place.rank)

    rule = Collectives(ranks).rule([output(side) for side in ranks], [output(alone)])
    assert (rule and rule.tp) == {None: -1, "order": "split"}.get(change)


def test_what_a_sum_gives_are_copies(dumps):
    ranks = [Side(dumps / "gathered+mix-both" / "step0" / f"rank{rank}") for rank in range(2)]
    sums = [next(c for c in side.step_data.calls if c.name == "Distributed.all_reduce" and c.call == 2) for side in ranks]
    parts = [RankPart(side, call.out[0], rank, (0,), rank) for rank, (side, call) in enumerate(zip(ranks, sums, strict=True))]
    assert Collectives(ranks).rule(parts) is COPIES


STYLES = ["mix-statistics", "mix-both", "mix-tensor", "L1-both", "L0-both", "L0-tensor"]


@pytest.fixture(scope="module")
def of_others(tmp_path_factory, require) -> Path:
    require("deepspeed")
    folder = tmp_path_factory.mktemp("styles")
    for plan in STYLES:
        train_styles.train(folder / f"alone+{plan}", plan=plan)
    launch(train_styles.__file__, 2, str(folder), *(f"{kind}+{plan}" for kind in ("styles", "deepspeed") for plan in STYLES))
    return folder


@pytest.mark.parametrize("plan", STYLES)
@pytest.mark.parametrize("kind", ["styles", "deepspeed"])
def test_what_torch_and_deepspeed_spread_agrees_with_one_process(of_others, capsys, kind, plan):
    code, said, calls = compared(of_others, f"{kind}+{plan}", capsys)
    assert code in (0, 1), said
    assert {call["verdict"] for call in calls} <= {"identical", "rounding", "carried"}
    assert len(calls) > 20, said
