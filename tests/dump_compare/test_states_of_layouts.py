"""What optimizers keep and make, across layouts: healthy pairs agree; what one rank does otherwise is named with its slot."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import trainprobe
from tests.distributed.launch import launch
from tests.dump_compare import train_layouts
from trainprobe.cli import main
from trainprobe.dump_compare.layouts.rank_boxes import Box, holder, put_together
from trainprobe.engine.core.step_data import numbers_of_rows
from trainprobe.engine.stats.checksum import fingerprint
from trainprobe.engine.storage.dumps import read

HEALTHY = ["ddp", "fsdp1", "fsdp2", "tensor", "pipeline", "redundancy"]
DEEPSPEED = ["zero1", "zero2", "zero3"]
OPTIMIZERS = [
    *("ddp-adafactor", "ddp-sgd", "ddp-frozen", "ddp-capturable", "ddp-amsgrad"),
    *("fsdp2-momentum", "fsdp2-frozen", "tensor-muon", "redundancy-momentum"),
]
IN_BLOCKS = ["ddp-blocks", "tensor-blocks"]
MOMENTS = "exp_avg", "exp_avg_sq"
COPY = "in B, rank 1 holds another copy than rank 0"
CHANGED = "rank 1 of B changed it in between"
LARGEST = r"Parameter\.(layers\.\d\.(up|down)|embed|head)\.weight"
PLANTED = {  # layout and fault → step, and words of the first line
    "ddp:rate": (0, ["value_after", COPY]),
    "ddp:decay": (0, ["value_after", COPY]),
    "ddp:betas": (0, ["exp_avg_after", COPY]),
    "ddp:moment": (1, ["exp_avg:", COPY, CHANGED]),
    "ddp:steps": (1, ["step:", COPY, CHANGED]),
    "fsdp1:decay": (0, ["value_after is at least"]),
    "fsdp1:betas": (0, ["exp_avg_after is at least"]),
    "fsdp1:square": (1, ["exp_avg_sq is 1.05 times as large in B", CHANGED]),
    "fsdp1:lost": (1, ["exp_avg is at least", CHANGED]),
    "fsdp2:rate": (0, ["value_after is at least"]),
    "fsdp2:betas": (0, ["exp_avg_after is at least"]),
    "fsdp2:moment": (1, ["exp_avg is at least", CHANGED]),
    "fsdp2:restart": (1, ["it is given something else", "ranks 0, 1 of B changed it in between"]),
    "fsdp2:forgotten": (1, ["it is given something else", CHANGED]),
    "tensor:square": (1, ["exp_avg_sq is at least", CHANGED]),
    "redundancy:decay": (0, ["value_after"]),
    "redundancy:moment": (1, ["exp_avg is 1.05 times as large in B", CHANGED]),
}
DEEPSPEED_PLANTED = {
    "zero1:rate": (0, ["value_after is at least"]),
    "zero1:moment": (1, ["exp_avg is at least", CHANGED]),
    "zero2:betas": (0, ["exp_avg_after is at least"]),
    "zero3:square": (1, ["exp_avg_sq is at least", CHANGED]),
    "zero3:restart": (1, ["it is given something else", "ranks 0, 1 of B changed it in between"]),
}


def recorded(layout: str) -> str:
    kind, colon, fault = layout.partition(":")
    return f"{kind}+states{colon}{fault}"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    for optimizer in {layout.partition("-")[2] for layout in (*OPTIMIZERS, *IN_BLOCKS)}:
        train_layouts.train(folder / f"alone-{optimizer}", f"alone-{optimizer}", level="states")
    train_layouts.train(folder / "alone", level="states")
    train_layouts.train(folder / "fused", "fused", level="states")
    layouts = [recorded(layout) for layout in (*HEALTHY, *OPTIMIZERS, *IN_BLOCKS, *PLANTED)]
    launch(train_layouts.__file__, 2, str(folder), *layouts, timeout=300)
    return folder


@pytest.fixture(scope="module")
def deepspeed_dumps(dumps, require) -> Path:
    """DeepSpeed counts steps from 1, which is no matter of a comparison: its folders are numbered as the others."""
    require("deepspeed")
    layouts = [recorded(layout) for layout in (*DEEPSPEED, *DEEPSPEED_PLANTED)]
    launch(train_layouts.__file__, 2, str(dumps), *layouts, timeout=300)
    for layout in layouts:
        for step in (1, 2):
            (dumps / layout / f"step{step}").rename(dumps / layout / f"step{step - 1}")
    return dumps


def compared(folder: Path, a: str, b: str, capsys) -> tuple[int, str, dict]:
    capsys.readouterr()
    code = main(["dump-compare", str(folder / a), str(folder / b), "--json", str(folder / "all.json")])
    return code, capsys.readouterr().out, json.loads((folder / "all.json").read_text())


def values_of(found: dict, step: int) -> dict[tuple[str, str], dict]:
    """(parameter, slot) → what is told of it."""
    states = [call for call in found["calls"] if call["a"].startswith("Parameter.") and call["step"] == step]
    return {(call["a"].removeprefix("Parameter."), value["slot"]): value for call in states for value in call["values"]}


def assert_agree(found: dict, said: str) -> None:
    assert {call["verdict"] for call in found["calls"]} <= {"identical", "rounding", "carried"}, said
    assert "not compared" not in said, said


def assert_every_state_was_compared(found: dict) -> None:
    names = [name for name, _ in train_layouts.Gpt().named_parameters()]
    behind, before = values_of(found, 0), values_of(found, 1)
    for name in names:
        assert {slot for of, slot in behind if of == name} >= {"value_after", "step_after", *(f"{m}_after" for m in MOMENTS)}
        assert {slot for of, slot in before if of == name} >= {"step", *MOMENTS}


@pytest.mark.parametrize("layout", HEALTHY)
def test_all_that_an_optimizer_keeps_and_makes_agrees_with_one_process(dumps, capsys, layout):
    code, said, found = compared(dumps, "alone", recorded(layout), capsys)
    assert code == (0 if layout == "pipeline" else 1), said
    assert_agree(found, said)
    assert_every_state_was_compared(found)


@pytest.mark.frameworks
@pytest.mark.parametrize("layout", DEEPSPEED)
def test_what_zero_keeps_and_makes_agrees_with_one_process(deepspeed_dumps, capsys, layout):
    code, said, found = compared(deepspeed_dumps, "alone", recorded(layout), capsys)
    assert code == 1, said
    assert_agree(found, said)
    assert_every_state_was_compared(found)


@pytest.mark.parametrize("layout", OPTIMIZERS)
def test_other_optimizers_and_frozen_weights_agree_with_one_process(dumps, capsys, layout):
    code, said, found = compared(dumps, f"alone-{layout.partition('-')[2]}", recorded(layout), capsys)
    assert code == 1, said
    assert_agree(found, said)


@pytest.mark.parametrize("layout", IN_BLOCKS)
def test_states_in_blocks_of_what_a_rank_holds_are_left_out(dumps, capsys, layout):
    code, said, found = compared(dumps, "alone-blocks", recorded(layout), capsys)
    assert code == 1, said
    slots = {slot for _, slot in values_of(found, 1)}
    assert "momentum_buffer" in slots and "state1" not in slots, slots
    assert "values that dumps hold of parameters are not compared, as each layout has its own: state1" in said, said
    cut = layout.startswith("tensor")
    assert ("values that optimizers keep could not be joined; the first is absmax1" in said) == cut, said


def test_fingerprints_of_states_are_taken_where_a_dump_holds_both(tmp_path):
    """NumPy's, of what the optimizer keeps; none of what it makes where its state is not recorded."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for name, states in (("states", True), ("plain", False)):
        monitor = {"parameters": True, "gradients": True, "optimizer_state": states}
        with (
            trainprobe.watch(
                model, optimizer, output=tmp_path / name, console=False, level="L0", summary="both", monitor=monitor
            ) as probe,
            probe.step(),
        ):
            optimizer.zero_grad()
            (model(torch.ones(2, 5)) ** 2).mean().backward()
            optimizer.step()
        step_data = read(tmp_path / name / "step0" / "rank0")
        checksums = numbers_of_rows(step_data)["checksum"]
        made = {slot: value for call in step_data.states if call.name == "weight" for slot, value in call.params.items()}
        if states:
            for slot in MOMENTS:
                kept = optimizer.state[model.weight][slot].numpy()
                assert checksums[made[f"{slot}_after"].row] == fingerprint(kept)
            assert checksums[made["value_after"].row] == fingerprint(model.weight.detach().numpy())
        else:
            assert set(made) == {"value", "grad", "value_after"}
            assert checksums[made["value_after"].row] is None and checksums[made["grad"].row] is not None


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_moments_that_lie_otherwise_are_known_to_be_the_same_bits(dumps, capsys, layout):
    """DDP and both FSDP add the same two gradients: what they step is the same, whole, in slices or in rows."""
    code, said, found = compared(dumps, recorded("ddp"), recorded(layout), capsys)
    assert code in (0, 1), said
    moments = {at: value for at, value in values_of(found, 0).items() if at[1] in ("exp_avg_after", "exp_avg_sq_after")}
    assert len(moments) == 2 * len(list(train_layouts.Gpt().parameters()))
    assert {(value["evidence"], value["high"]) for value in moments.values()} == {("bits", 0.0)}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_an_optimizer_of_one_rank_does_otherwise_is_named(dumps, capsys, planted):
    assert_named(dumps, planted, PLANTED[planted], capsys)


@pytest.mark.frameworks
@pytest.mark.parametrize("planted", DEEPSPEED_PLANTED)
def test_what_the_optimizer_of_one_rank_of_zero_does_otherwise_is_named(deepspeed_dumps, capsys, planted):
    assert_named(deepspeed_dumps, planted, DEEPSPEED_PLANTED[planted], capsys)


def assert_named(folder: Path, planted: str, expected: tuple[int, list[str]], capsys) -> None:
    step, words = expected
    code, said, _ = compared(folder, "alone", recorded(planted), capsys)
    first = said.splitlines()[0]
    assert code == 2, said
    assert re.search(rf"{LARGEST} \(step {step}\)", first), first
    for each in words:
        assert each in first, first
    if planted.endswith("rate"):
        assert "lr is 0.001 on rank 0 of A and 0.0011 on rank 1 of B" in said, said


def test_without_the_calls_that_agree_the_answer_is_the_same(dumps, capsys):
    sides = [str(dumps / "alone"), str(dumps / recorded("fsdp2:moment"))]
    said = []
    for more in ([], ["--json", str(dumps / "all.json")]):
        main(["dump-compare", *sides, *more])
        said.append(capsys.readouterr().out.splitlines()[0])
    assert said[0] == said[1] and CHANGED in said[0]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "tensor"])
def test_states_of_one_projection_are_those_of_three(dumps, capsys, layout):
    code, said, found = compared(dumps, "fused", recorded(layout), capsys)
    assert code == 1, said
    assert_agree(found, said)
    slots = {slot for (name, slot) in values_of(found, 1) if name == "layers.1.qkv.weight"}
    assert slots >= {*MOMENTS, "step", "value_after", "exp_avg_after", "step_after"}, slots


def test_a_moment_of_one_of_three_is_named(dumps, tmp_path, capsys):
    changed = without(dumps / recorded("ddp"), tmp_path, "layers.1.v.weight", "exp_avg", factor=1.5)
    code, said, _ = compared(dumps, "fused", str(changed), capsys)
    first = said.splitlines()[0]
    assert code == 2, said
    assert "Parameter.layers.1.qkv.weight, Parameter.layers.1.q+k+v.weight in B, (step 1)" in first, first
    assert "exp_avg is at least" in first, first


def without(dump: Path, folder: Path, parameter: str, slot: str, factor: float | None = None, ranks: str = "rank*") -> Path:
    """Return a copy of a dump that lacks a slot of parameters whose name begins so, or has other statistics there."""
    copied = shutil.copytree(dump, folder / "changed")
    for path in copied.glob(f"step*/{ranks}/dump.json"):
        top = json.loads(path.read_text())
        for name, _, _, values in top["trainprobe"]["states"]:
            if name.startswith(parameter) and slot in values and factor is None:
                del values[slot]
            elif name.startswith(parameter) and slot in values:
                leaf = values[slot]
                numbers = ("Max", "Min", "Mean", "Norm")
                values[slot] = {at: x * factor if at in numbers else x for at, x in leaf.items() if at != "checksum"}
        path.write_text(json.dumps(top))
    return copied


def test_what_one_side_alone_keeps_is_said(dumps, tmp_path, capsys):
    """A count of steps that another framework keeps elsewhere is a note; a moment of some parameters is no agreement."""
    no_counts = without(dumps / recorded("ddp"), tmp_path / "a", "", "step")
    no_counts = without(no_counts, tmp_path / "b", "", "step_after")
    code, said, _ = compared(dumps, "alone", str(no_counts), capsys)
    assert code == 1, said
    assert "A alone holds step, step_after of parameters (35): these are not compared" in said, said
    lacking = without(dumps / recorded("ddp"), tmp_path / "c", "layers.0", "exp_avg_after")
    code, said, _ = compared(dumps, "alone", str(lacking), capsys)
    assert code == 3, said
    assert "parameters whose exp_avg_after is in A alone: 16; the first is layers.0" in said, said


def test_a_state_of_which_a_rank_shows_nothing_is_no_agreement(dumps, tmp_path, capsys):
    part = without(dumps / recorded("fsdp2"), tmp_path, "layers.0.up", "exp_avg_after", ranks="rank1")
    code, said, _ = compared(dumps, "alone", str(part), capsys)
    assert code == 3, said
    assert "exp_avg_after of layers.0.up.weight is held by ranks of B in part alone" in said, said


BOXES = {
    "rows": [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))],
    "columns": [Box((0, 0), (4, 2)), Box((0, 2), (4, 4))],
    "flat": [Box((0,), (7,)), Box((7,), (17,))],
    "pieces of rectangles": [
        *(Box((0,), (5,), ((0, 0), (4, 3))), Box((5,), (7,), ((0, 0), (4, 3)))),
        *(Box((0,), (12,), ((0, 3), (4, 3))),),
    ],
}


@pytest.mark.parametrize("way", BOXES)
def test_the_rank_that_holds_an_element_is_the_one_whose_part_is_there(way):
    boxes = BOXES[way]
    parts = (np.full(box.shape, i) for i, box in enumerate(boxes))
    whole = put_together(parts, boxes)
    assert whole is not None and whole.size == 24
    assert {at: holder(boxes, at) for at in np.ndindex(*whole.shape)} == {at: whole[at] for at in np.ndindex(*whole.shape)}


def test_of_stored_elements_the_rank_is_named_that_holds_the_furthest(tmp_path, capsys):
    train_layouts.train(tmp_path / "alone", level="tensors")
    launch(train_layouts.__file__, 2, str(tmp_path), "tensor+tensors:key weight")
    code, said, found = compared(tmp_path, "alone", "tensor+tensors:key weight", capsys)
    assert code == 2, said
    notes = [value["note"] for call in found["calls"] for value in call["values"] if call["a"].startswith("Module.layers.1.k.")]
    assert any(re.fullmatch(r"most at \[[\d, ]+\] in B, which rank 1 holds", note or "") for note in notes), notes
