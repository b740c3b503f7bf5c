"""A third run beside two dumps: it measures what rounding does to each result, or says which side is nearer to the truth."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.dump_compare.runs import Way, train
from trainprobe.cli import main
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.intervals import interval
from trainprobe.engine.core.step_data import entry_name, slots

PLAN = {"level": "L0", "task": "tensor"}
LAST_BIT = 2.0**-24


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of runs of one GPT: as it is, in a changed way, with weights moved by rounding, and in float64."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {
        "plain": Way(),
        "gelu": Way(change="gelu"),
        "moved": Way(noise=LAST_BIT),
        "gelu moved": Way(change="gelu", noise=LAST_BIT),
        "float64": Way(dtype=torch.float64),
    }
    return {name: train(folder / name, "gpt", way, **PLAN) for name, way in ways.items()}


def compared(runs, tmp_path, capsys, *words: str) -> tuple[int, str, dict]:
    """Compare the plain run with the changed one."""
    capsys.readouterr()
    out = str(tmp_path / "all.json")
    code = main(["dump-compare", str(runs["plain"]), str(runs["gelu"]), "--json", out, *words])
    return code, capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())


@pytest.mark.parametrize(("floor", "of"), [("moved", "plain"), ("gelu moved", "gelu")])
def test_rounding_is_as_the_run_measured_it_whichever_side_it_repeats(runs, tmp_path, capsys, floor, of):
    code, said, found = compared(runs, tmp_path, capsys, "--floor", str(runs[floor]))
    assert (code, found["first"]["a"]) == (2, "Module.layers.1.act.GELU.forward.0")
    assert "measured rounding" in said and "was measured for" in said
    sides = [Side(runs[name] / "step0/rank0") for name in (of, floor)]
    values = [{(entry_name(call), slot): v for call in side.step_data.calls for slot, v in slots(call)} for side in sides]
    measured = 0
    for call in found["calls"]:
        for value in call["values"]:
            if call["step"] == 0 and value["floor"]:
                key = call["a"], value["slot"]
                assert value["floor"] == pytest.approx(interval(sides[0], values[0][key], sides[1], values[1][key]).high)
                measured += 1
    assert measured > 20


def test_a_run_with_the_same_bits_has_measured_nothing_and_a_model_speaks(runs, tmp_path, capsys):
    code, said, found = compared(runs, tmp_path, capsys, "--floor", str(runs["plain"]))
    assert code == 2 and "is worked out by a model" in said
    assert not any(value["floor"] for call in found["calls"] for value in call["values"])


def test_healthy_runs_beside_a_floor_have_no_bug(runs, tmp_path, capsys):
    other = train(tmp_path / "threads", "gpt", Way(threads=2), **PLAN)
    capsys.readouterr()
    assert main(["dump-compare", str(runs["plain"]), str(other), "--floor", str(runs["moved"])]) == 1
    said = capsys.readouterr().out
    assert " bug" not in said and " suspicious" not in said


def test_the_side_that_is_further_from_high_precision_is_named(runs, tmp_path, capsys):
    code, said, found = compared(runs, tmp_path, capsys, "--high-precision", str(runs["float64"]))
    assert code == 2 and ": B is further from it" in said
    output = next(value for value in found["first"]["values"] if value["slot"] == "output")
    assert output["from_truth"][0] < 1e-6 < 1e-5 < output["from_truth"][1]


def test_a_step_that_the_third_run_lacks_is_said(runs, tmp_path, capsys):
    short = train(tmp_path / "short", "gpt", Way(noise=LAST_BIT), **PLAN)
    (short / "step1").rename(tmp_path / "step1")
    (short / "step0").rename(short / "step7")
    (tmp_path / "step1").rename(short / "step8")
    _, said, _ = compared(runs, tmp_path, capsys, "--floor", str(short))
    assert "has no step 0 of rank 0" in said


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).bfloat16()
with torch.no_grad():
    model.bias[:3] = 0
before = [p.detach().clone() for p in model.parameters()]
state = torch.get_rng_state()
torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
assert torch.equal(state, torch.get_rng_state())
for old, new in zip(before, model.parameters()):
    up, down = (torch.nextafter(old, torch.full_like(old, far)) for far in (torch.inf, -torch.inf))
    zero = old == 0
    assert (new[zero] == 0).all() and ((new == up) | (new == down))[~zero].all()
    assert 0.3 < (new == up)[~zero].float().mean() < 0.7
"""


def test_a_floor_run_begins_with_weights_that_are_moved_once_by_their_last_bit(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trainprobe", "floor", "--output", "out", "default", "--", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "4160 weights were moved by their last bit" in done.stderr


def test_a_way_that_is_not_known_is_an_error(capsys):
    assert main(["floor", "--way", "thread", "--", "script.py"]) == 3
    assert "--way 'thread' is none of repeat, threads, perturb" in capsys.readouterr().err
