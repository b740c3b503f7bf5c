"""Tensor parallelism that is written by hand, with plain modules: its collectives prove how activations lie over the ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.dump_compare import train_by_hand
from trainprobe.cli import main
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.layouts.collectives import Collectives
from trainprobe.dump_compare.layouts.joined import RankPart

DOWN = "Module.blocks.1.down.Linear.forward.0 (step 0"
PLANTED = {
    "tensor:partial": (DOWN, "output is at least"),
    "sequence:partial": (DOWN, "output is at least"),
    "tensor:norm": ("Module.blocks.1.norm.LayerNorm.forward.0 (step 0", "rank 1 holds another copy than rank 0"),
    "sequence:norm": ("Module.blocks.1.norm.LayerNorm.forward.0 (step 0", "output is at least"),
    "tensor:residual": ("Module.blocks.1.Block.forward.0 (step 0", "rank 1"),
    "tensor:reduce": ("Module.blocks.0.down.Linear.forward.0 (step 0", "rank 1 holds another copy than rank 0"),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("by_hand")
    train_by_hand.train(folder / "alone")
    train_by_hand.train(folder / "alone+L0", level="L0")
    script = train_by_hand.__file__
    launch(script, 2, str(folder), "tensor", "sequence", "tensor+L0", *PLANTED, timeout=200)
    return folder


def compared(dumps: Path, a: Path, b: Path, capsys) -> tuple[int, str, dict]:
    code = main(["dump-compare", str(a), str(b), "--json", str(dumps / "all.json")])
    return code, capsys.readouterr().out, json.loads((dumps / "all.json").read_text())


def with_other_text(folder: Path, into: Path, change: Callable[[str], str]) -> Path:
    for path in folder.rglob("*.json"):
        target = into / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(change(path.read_text()))
    return into


@pytest.mark.parametrize("layout", ["tensor", "sequence"])
def test_a_healthy_layout_has_no_bug(dumps, capsys, layout):
    code, said, found = compared(dumps, dumps / "alone", dumps / layout, capsys)
    assert code == 1, said
    assert {call["verdict"] for call in found["calls"]} <= {"identical", "rounding", "carried"}
    values = {(call["a"], value["slot"]) for call in found["calls"] for value in call["values"]}
    assert {
        ("Module.blocks.1.down.Linear.forward.0", "output"),
        ("Module.blocks.1.up.Linear.backward.0", "grad_input.0"),
        ("Torch.add.1.forward", "output"),  # is given what the collective made
    } <= values


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_named_first(dumps, capsys, fault):
    code, said, _ = compared(dumps, dumps / "alone", dumps / fault, capsys)
    assert code == 2, said
    assert all(words in said.splitlines()[0] for words in PLANTED[fault]), said


def test_without_collectives_terms_look_like_other_copies_and_it_is_said(dumps, capsys):
    code, said, _ = compared(dumps, dumps / "alone+L0", dumps / "tensor+L0", capsys)
    assert code == 2
    assert "B holds no collectives: what ranks hold otherwise may be terms that one adds up" in said, said


@pytest.mark.parametrize("change", ["maximum", "group", "numbers"])
def test_only_a_sum_of_this_value_over_these_ranks_proves_anything(dumps, tmp_path, change):
    """Another operation, another group, other numbers: the value may be anything."""
    texts = {
        "maximum": lambda text: text.replace("RedOpType.SUM", "RedOpType.MAX"),
        "group": lambda text: re.sub(r'"group_ranks": ?\[0, ?1\]', '"group_ranks": [0]', text),
        "numbers": lambda text: text,
    }
    changed = with_other_text(dumps / "tensor", tmp_path / "changed", texts[change])
    ranks = [Side(changed / "step0" / f"rank{rank}") for rank in range(2)]
    outputs = {}
    for side in ranks:
        call = next(
            c for c in side.step_data.calls if c.kind == "module" and c.name == "blocks.1.down" and c.phase == "forward"
        )
        outputs[side.step_data.place.rank] = call.out[0]
    parts = [RankPart(side, outputs[rank], rank, (0,), rank) for rank, side in enumerate(ranks)]
    if change == "numbers":  # a value of the same shape that nobody summed
        inside = [next(c for c in side.step_data.calls if c.name == "blocks.1.norm" and c.phase == "forward") for side in ranks]
        assert Collectives(ranks).rule(parts) is not None
        parts = [
            RankPart(side, call.out[0], rank, (0,), rank) for rank, (side, call) in enumerate(zip(ranks, inside, strict=True))
        ]
    assert Collectives(ranks).rule(parts) is None
