"""Real pairs of dumps: what is changed in a run is the place that is named, and rounding alone is no difference."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from benchmarks.dump_compare.planted import PLANTS
from benchmarks.dump_compare.runs import train
from tests.dump_compare.small_runs import Gpt, run
from trainprobe.cli import main
from trainprobe.dump_compare.command import compare_rank
from trainprobe.dump_compare.pairing import pair_ranks
from trainprobe.dump_compare.result_schema import DumpComparison
from trainprobe.dump_compare.verdict import judge_runs
from trainprobe.engine.core.step_data import entry_name, unwrap
from trainprobe.engine.storage.dumps import TensorStore, read

PLANS = {
    "statistics": {"level": "mix"},
    "both": {"level": "mix", "summary": "both"},
    "checksum": {"level": "L1", "summary": "checksum"},
    "md5": {"level": "L1", "summary": "md5"},
    "tensors": {"level": "L1", "task": "tensor"},
    "modules": {"level": "L0"},
}


def compared(tmp_path, capsys, plan: dict, change: str = "", base: str = "", **how) -> tuple[int, str, dict]:
    """Run twice, compare; return the exit code, what was printed and the JSON."""
    dropout = how.pop("dropout", 0.0)
    a = run(tmp_path / "a", base, dropout=dropout, **plan)
    b = run(tmp_path / "b", change, dropout=dropout, **how, **plan)
    capsys.readouterr()
    code = main(["dump-compare", str(a), str(b), "--json", str(tmp_path / "all.json")])
    return code, capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_equal_runs_are_identical(tmp_path, capsys, plan):
    code, said, found = compared(tmp_path, capsys, plan)
    assert code == 0, said
    assert {call["verdict"] for call in found["calls"]} == {"identical"}


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("statistics", "Functional.gelu.1.forward"),
        ("both", "Functional.gelu.1.forward"),
        ("tensors", "Functional.gelu.1.forward"),
        ("checksum", "Functional.gelu.1.forward"),
        ("md5", "Functional.gelu.1.forward"),
        ("modules", "Module.layers.1.act.GELU.forward.0"),
    ],
)
def test_an_op_of_another_kind_is_named(tmp_path, capsys, plan, name):
    code, said, found = compared(tmp_path, capsys, PLANS[plan], "gelu")
    assert code == 2, said
    assert (found["first"]["a"], found["first"]["step"], found["first"]["given"]) == (name, 0, 0.0)
    if plan != "modules":
        assert found["first"]["argument"] == "approximate is 'none' in A and 'tanh' in B"


@pytest.mark.parametrize("plan", ["statistics", "both", "tensors", "modules"])
def test_another_algorithm_for_the_same_thing_is_rounding(tmp_path, capsys, plan):
    code, said, found = compared(tmp_path, capsys, PLANS[plan], "attention")
    assert code == (1 if plan == "modules" else 3), said  # its ops have no partner; modules all have
    assert found["verdict"].startswith("what both dumps hold agrees within rounding")
    assert not {call["verdict"] for call in found["calls"]} & {"bug", "suspicious", "unknown"}


@pytest.mark.parametrize("plan", ["statistics", "modules"])
def test_a_step_in_bfloat16_is_within_its_rounding(tmp_path, capsys, plan):
    code, said, _ = compared(tmp_path, capsys, PLANS[plan], "bfloat16")
    assert code == 1, said


def test_an_op_more_is_told_and_shifts_nothing(tmp_path, capsys):
    code, said, found = compared(tmp_path, capsys, PLANS["both"], "extra")
    assert code == 3
    assert (
        "calls have no partner; the first is Tensor.add.3.forward (step 0, micro-batch 0, rank 0), which is in B alone" in said
    )
    alone = [call for call in found["calls"] if call["verdict"] == "missing"]
    assert {(call["a"], call["b"].rpartition(".")[2]) for call in alone} == {(None, "forward"), (None, "backward")}
    assert {call["verdict"] for call in found["calls"]} == {"identical", "missing"}


def test_an_op_more_that_changes_numbers_is_told_before_the_first_that_is_given_them(tmp_path, capsys):
    code, said, found = compared(tmp_path, capsys, PLANS["both"], "scale")
    assert (code, found["first"]["a"]) == (2, "Tensor.transpose.1.forward")
    assert "before it, only B runs Tensor.mul.0.forward" in said


@pytest.mark.parametrize("plan", PLANS)
def test_another_batch_is_told_as_such_and_never_passes(tmp_path, capsys, plan):
    code, said, found = compared(tmp_path, capsys, PLANS[plan], "data")
    assert code == 2, said
    assert "it is given something else, input.0" in found["verdict"]
    assert found["first"]["a"] in ("Tensor.__getitem__.0.forward", "Module.root.Gpt.forward.0")


@pytest.mark.parametrize("plan", PLANS)
def test_one_other_element_of_a_weight_is_named_where_it_is_used(tmp_path, capsys, plan):
    def meddle(model: Gpt) -> None:
        model.layers[1].out.weight[3, 4] += 0.01

    code, said, found = compared(tmp_path, capsys, PLANS[plan], meddle=meddle)
    assert code == 2, said
    modules = plan in ("statistics", "both", "modules")
    assert found["first"]["a"] == ("Module.layers.1.out.Linear.forward.0" if modules else "Functional.linear.5.forward")
    assert ("the weights differ, parameters.weight" if modules else "it is given something else, input.1") in found["verdict"]


def test_other_random_numbers_are_named_with_a_hint(tmp_path, capsys):
    code, _, found = compared(tmp_path, capsys, PLANS["statistics"], "seed", dropout=0.2)
    assert (code, found["first"]["a"]) == (2, "Functional.dropout.0.forward")
    assert "it draws random numbers" in found["verdict"]


def test_a_nan_on_one_side_is_a_bug_at_the_op_that_makes_it(tmp_path, capsys):
    def meddle(model: Gpt) -> None:
        model.layers[2].norm.eps = -1e9

    code, _, found = compared(tmp_path, capsys, PLANS["statistics"], meddle=meddle)
    assert (code, found["first"]["a"]) == (2, "Functional.layer_norm.2.forward")
    assert "NaN or infinities in B alone" in json.dumps(found["first"])


def test_nothing_to_compare_is_no_pass(tmp_path, capsys):
    a, b = run(tmp_path / "a", level="L1", summary="checksum"), run(tmp_path / "b", level="L1", summary="md5")
    assert main(["dump-compare", str(a), str(b)]) == 3
    assert "cannot be compared: both dumps need statistics, or fingerprints of one kind" in capsys.readouterr().out


def test_a_step_that_one_side_lacks_is_no_pass(tmp_path, capsys):
    a, b = run(tmp_path / "a", level="L0"), run(tmp_path / "b", level="L0")
    shutil.copytree(a / "step1", a / "step5")
    assert main(["dump-compare", str(a), str(b)]) == 3
    assert "step 5 is in A alone" in capsys.readouterr().out
    assert main(["dump-compare", str(a / "step5"), str(b / "step1"), "-q"]) == 0  # one step each: whatever their numbers


def test_a_name_is_changed_on_the_way(tmp_path, capsys):
    a = run(tmp_path / "a", level="L0")
    for path in a.rglob("*.json"):
        path.write_text(path.read_text().replace("Module.layers.", "Module.model.layers."))
    b = run(tmp_path / "b", level="L0")
    assert main(["dump-compare", str(a), str(b), "-q"]) == 0
    assert "24 modules of A paired by structure" in capsys.readouterr().out
    assert main(["dump-compare", str(a), str(b), "-q", "--rename", r"^model\.="]) == 0
    assert main(["dump-compare", str(a), str(b), "--rename", "("]) == 3
    assert "--rename '(' has no '='" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["nothing", "."])
def test_a_path_without_a_dump_is_an_error(tmp_path, capsys, path):
    assert main(["dump-compare", str(tmp_path / path), str(tmp_path / path)]) == 3
    assert "no dump at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "named", "said"),
    [
        ("gpu.zip", "gpu.zip", "gpu.zip: it is a file; name the folder"),
        ("other.json", "other.json", "other.json: expected step folders"),
        ("rank0/records.jsonl", ".", "rank0 holds a run log"),
        ("rank0/records.jsonl", "rank0", "rank0 holds a run log"),
        ("rank0/metrics-000000.parquet", ".", "rank0 holds a run log"),
        ("rank0/stack.json", ".", "expected step folders"),
        ("a", "b", "b: there is no such file or folder"),
    ],
)
def test_what_is_no_dump_is_told_by_its_own_path(tmp_path, capsys, there, named, said):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).touch()
    assert main(["dump-compare", str(tmp_path / named), str(tmp_path / named)]) == 3
    told = capsys.readouterr().err
    assert f"no dump at {tmp_path / named}: " in told and said in told


def test_ranks_are_compared_each_with_its_own(tmp_path, capsys):
    a, b = run(tmp_path / "a", level="L0", step=[0]), run(tmp_path / "b", level="L0", step=[0])
    other = run(tmp_path / "c", "gelu", level="L0", step=[0])
    for side, second in ((a, a), (b, other)):
        shutil.copytree(second / "step0/rank0", side / "step0/rank1")
    code = main(["dump-compare", str(a), str(b), "-q"])
    said = capsys.readouterr().out
    assert code == 2 and "rank 1" in said and "Module.layers.1.act.GELU.forward.0" in said


def test_the_numbers_are_those_of_numpy_where_values_are_stored(tmp_path, capsys):
    _, _, found = compared(tmp_path, capsys, PLANS["tensors"], "gelu")
    values = {}
    for side in "ab":
        folder = tmp_path / side / "step0/rank0"
        step_data = read(folder)
        (out,) = (call.out for call in step_data.calls if entry_name(call) == "Functional.gelu.1.forward")
        values[side] = TensorStore(folder).array(unwrap(out).tensor).astype(np.float64)
    a, b = values["a"], values["b"]
    told = next(value for value in found["first"]["values"] if value["slot"] == "output")
    far = np.linalg.norm(a - b) / max(np.linalg.norm(a), np.linalg.norm(b))
    assert told["low"] == told["high"] == pytest.approx(far, rel=1e-12)


def test_the_published_schema_is_that_of_what_is_written(tmp_path, capsys):
    published = Path(__file__).parents[2] / "docs/dump_compare.schema.json"
    assert main(["dump-compare", "--schema"]) == 0
    assert capsys.readouterr().out == published.read_text(), (
        "run `trainprobe dump-compare --schema > docs/dump_compare.schema.json`"
    )
    compared(tmp_path, capsys, PLANS["modules"], "gelu")
    whole = TypeAdapter(DumpComparison).validate_json((tmp_path / "all.json").read_bytes())
    assert whole.first is not None and whole.first in whole.calls
    odd = (tmp_path / "all.json").read_text().replace('"given"', '"handed"', 1)
    with pytest.raises(ValidationError):
        TypeAdapter(DumpComparison).validate_json(odd)


@pytest.mark.parametrize(("subject", "change"), [("gpt", "label smoothing"), ("lstm", "weight decay"), ("moe", "capacity")])
def test_planted_differences_are_named_first(tmp_path, subject, change):
    plant = next(one for one in PLANTS if (one.subject, one.change) == (subject, change))
    plan = {"level": "mix", "summary": "both", "step": [0]}
    a = train(tmp_path / "a", subject, plant.a, **plan)
    b = train(tmp_path / "b", subject, replace(plant.a, change=change), **plan)
    pairs, missing = pair_ranks(a, b)
    found = judge_runs([compare_rank(pair) for pair in pairs], missing)
    assert found.code == 2 and found.first is not None, found.sentence
    call = found.first[1].call
    parent = f"{call.parent}/" if isinstance(call.parent, str) else ""
    assert plant.named(parent + entry_name(call), found.first[0].at.step), found.sentence
