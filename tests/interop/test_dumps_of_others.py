"""Small dumps that mindstudio-probe 26.2.0 wrote, read here: the same model, five tasks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainprobe.cli import main
from trainprobe.engine.storage.dumps import read

FIXTURES = Path(__file__).parent / "fixtures"
DUMPS = sorted(path for path in FIXTURES.rglob("*.json") if path.stem in {"dump", "debug"})


def leaves(tree):
    """Yield the tensor leaves of a dump as plain JSON, in order; parameters stand before the output, as in a record's order."""
    if isinstance(tree, list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict) and isinstance(tree.get("dtype"), str):
        yield tree
    elif isinstance(tree, dict):
        for key in sorted(tree, key=lambda key: key == "output"):
            yield from leaves(tree[key])


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: path.relative_to(FIXTURES).parts[0])
def test_every_number_of_every_tensor_is_read(path):
    step_data = read(path)
    expected = list(leaves(json.loads(path.read_text())["data"]))
    records = list(step_data.records())
    assert len(records) == len(expected) > 0
    for record, leaf in zip(records, expected, strict=True):
        assert (record.dtype, list(record.shape), record.tensor) == (leaf["dtype"], leaf["shape"], leaf.get("data_name"))
        value = leaf.get("md5")
        if isinstance(value, float):  # in xor mode a scalar's value stands in place of its bits
            assert set(record.values.values()) == {value}
            continue
        for name, key in (("max", "Max"), ("min", "Min"), ("mean", "Mean"), ("norm", "Norm")):
            number = leaf.get(key)
            assert (name in record.values) == (number is not None)
            if number is not None:
                assert record.values[name] == number or (math.isnan(number) and math.isnan(record.values[name]))
        assert record.values.get("crc32") == (None if value is None else int(value, 16))


def test_the_tree_and_the_stacks_are_read():
    step_data = read(FIXTURES / "statistics_mix/step1")
    inside = {call.name: call.parent.name for call in step_data.calls if call.parent is not None and call.phase == "forward"}
    assert inside["Functional.gelu"] == "layers.1"
    assert inside["layers.0.fc"] == "layers.0"
    first = next(call for call in step_data.calls if call.name == "embed")
    assert any("x = self.embed(t)" in frame for frame in step_data.stacks[first.stack])


def test_what_was_saved_by_name_is_read_with_its_gradient():
    step_data = read(FIXTURES / "debug/step1")
    assert [(r.site.name, r.site.slot, r.site.kind) for r in step_data.records()] == [
        ("probe_point", "value.y", "saved"),
        ("probe_point", "value.list.0", "saved"),
        ("probe_point", "grad.y", "saved"),
    ]
    assert step_data.calls[0].args["list"][1:] == [3, "text"]


@pytest.mark.parametrize(
    ("name", "step", "plan"),
    [
        ("statistics_mix", 1, {"level": "mix"}),
        ("tensor_l0", 0, {"level": "L0", "task": "tensor"}),
        ("md5_l1", 0, {"level": "L1", "summary": "md5"}),
    ],
)
def test_the_same_training_recorded_by_both_is_paired_call_by_call(tmp_path, capsys, name, step, plan):
    script = str(Path(__file__).with_name("train_small.py"))
    settings = json.dumps({**plan, "phases": ["forward", "backward"]})
    environment = {**os.environ, "PYTHONPATH": str(FIXTURES.parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, script, "trainprobe", str(tmp_path), settings], check=True, capture_output=True, env=environment
    )
    capsys.readouterr()
    arguments = ["dump-compare", str(tmp_path / f"step{step}"), str(FIXTURES / name / f"step{step}"), "--json"]
    code = main([*arguments, str(tmp_path / "all.json")])
    calls = json.loads((tmp_path / "all.json").read_text())["calls"]
    alone = [call["a"] or call["b"] for call in calls if call["verdict"] == "missing"]
    ours = {
        "Torch.arange.0.forward",
        "Torch.tensor.0.forward",
        "Tensor.reshape.0.forward",
    }  # of whole numbers: not recorded there
    assert set(alone) <= ours
    assert len(calls) > 20
    if name != "md5_l1":  # bits alone do not say whether another machine's rounding is more than that
        assert code in (1, 3) and not {call["verdict"] for call in calls} & {"bug", "suspicious", "unknown"}
