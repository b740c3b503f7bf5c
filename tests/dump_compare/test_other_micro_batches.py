"""The same samples in other numbers of micro-batches, and the same ranks with other shards: all of a step is one model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.dump_compare import train_micro_batches
from trainprobe.cli import main

ALONE = [*(f"alone:{n}" for n in (1, 2, 4)), "alone tied:1", "alone frozen:2"]
SPREAD = ["ddp:1", "ddp:4", "fsdp1:1", "fsdp2:1", "fsdp2:2", "tied:1", "frozen:2"]
HEALTHY = [
    ("alone:2", "alone:4"),  # one rank, 2 x 4 samples against 4 x 2
    ("alone:1", "alone:4"),
    ("alone:1", "fsdp2:2"),  # a loss divided by two is no sum that was not averaged
    ("alone:2", "fsdp2:2"),  # as many micro-batches, of other samples
    ("alone:4", "fsdp2:2"),
    ("alone:2", "ddp:4"),
    ("alone:2", "ddp:1"),
    ("ddp:1", "ddp:4"),
    ("ddp:1", "fsdp2:1"),  # one layout, and other shards
    ("ddp:1", "fsdp1:1"),
    ("fsdp1:1", "fsdp2:1"),
    ("ddp:4", "fsdp2:2"),
    ("alone tied:1", "tied:1"),
    ("alone frozen:2", "frozen:2"),
]
PLANTED = {
    ("ddp:1", "fsdp2:1:weight"): ("Parameter.head.weight (step 0)", "the weights differ"),
    ("alone:2", "ddp:2:scale"): ("Module.root.Model.backward.0 (step 0", "grad_output.0"),
    ("alone:2", "fsdp2:2:sample"): ("Module.root.Model.forward.0 (step 0", "it is given something else, input.0"),
    ("ddp:1", "ddp:4:sample"): ("Module.root.Model.forward.0 (step 0", "it is given something else, input.0"),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("micro_batches")
    for name in ALONE:
        kind, _, micro_batches = name.partition(":")
        train_micro_batches.train(folder / name, kind, int(micro_batches))
    script = train_micro_batches.__file__
    launch(script, 2, str(folder), *SPREAD, *(b for _, b in PLANTED), timeout=200)
    return folder


def compared(dumps: Path, a: str, b: str, capsys) -> tuple[int, str, dict]:
    code = main(["dump-compare", str(dumps / a), str(dumps / b), "--json", str(dumps / "all.json")])
    return code, capsys.readouterr().out, json.loads((dumps / "all.json").read_text())


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("a", "b"), HEALTHY)
def test_the_same_samples_and_weights_agree(dumps, capsys, a, b, swapped):
    code, said, found = compared(dumps, *((b, a) if swapped else (a, b)), capsys)
    assert code in (0, 1), said
    assert {call["verdict"] for call in found["calls"]} <= {"identical", "rounding", "carried"}, said
    slots = {(call["a"].partition(".")[0], value["slot"]) for call in found["calls"] for value in call["values"]}
    assert {("Module", "input.0"), ("Module", "output"), ("Parameter", "grad"), ("Parameter", "parameters.weight")} <= slots
    first = [call for call in found["calls"] if call["step"] == 0 and call["a"].startswith("Parameter.")]
    weights = [value for call in first for value in call["values"] if value["slot"].startswith("parameters")]
    assert {(value["evidence"], value["high"]) for value in weights} == {("bits", 0.0)}, said


@pytest.mark.parametrize(("a", "b"), PLANTED)
def test_what_is_planted_is_named_first(dumps, capsys, a, b):
    code, said, _ = compared(dumps, a, b, capsys)
    assert code == 2, said
    assert all(words in said.splitlines()[0] for words in PLANTED[a, b]), said


def test_it_is_said_how_samples_were_matched(dumps, capsys):
    said = compared(dumps, "alone:2", "alone:4", capsys)[1]
    assert "A has 2 micro-batches a step and B 4: those of each step were joined" in said
    said = compared(dumps, "alone:2", "fsdp2:2", capsys)[1]
    assert "micro-batches hold other samples on the two sides: those of a whole step were compared together" in said
    said = compared(dumps, "ddp:1", "fsdp2:1", capsys)[1]
    assert "A and B are DP2 with other shards of weights: those of each tensor were joined" in said


def test_what_optimizers_hold_is_compared(tmp_path, dumps, capsys):
    for name, micro_batches in (("one", 1), ("four", 4)):
        train_micro_batches.train(tmp_path / name, "alone", micro_batches, optimizer_state=True)
    code, said, found = compared(dumps, str(tmp_path / "one"), str(tmp_path / "four"), capsys)
    assert code == 1 and "not compared" not in said, said
    states = [call for call in found["calls"] if call["a"].startswith("Parameter.") and not call["a"].endswith(".grad")]
    slots = {value["slot"] for call in states for value in call["values"]}
    assert slots >= {"value_after", "step_after", "exp_avg_after", "exp_avg_sq_after", "step", "exp_avg", "exp_avg_sq"}, slots


def test_a_layout_with_itself_is_compared_rank_by_rank(dumps, capsys):
    code, said, found = compared(dumps, "fsdp2:2", "fsdp2:2", capsys)
    assert code == 0, said
    assert {call["rank"] for call in found["calls"]} == {0, 1}
    assert {call["micro"] for call in found["calls"] if "micro" in call} <= {0, 1}


def test_sheets_of_other_micro_batches_are_written_as_before(dumps, tmp_path, capsys):
    code = main(["dump-compare", str(dumps / "alone:2"), str(dumps / "alone:4"), "--sheets", str(tmp_path / "sheets")])
    assert code == 2 and list((tmp_path / "sheets").glob("*.csv")), capsys.readouterr()
