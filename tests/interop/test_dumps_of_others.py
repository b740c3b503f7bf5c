"""Small dumps that mindstudio-probe 26.2.0 wrote, read here: the same model, five tasks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trainprobe.engine.dumps import read

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
    reel = read(path)
    expected = list(leaves(json.loads(path.read_text())["data"]))
    records = list(reel.records())
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
    reel = read(FIXTURES / "statistics_mix/step1")
    inside = {call.name: call.parent.name for call in reel.calls if call.parent is not None and call.phase == "forward"}
    assert inside["Functional.gelu"] == "layers.1"
    assert inside["layers.0.fc"] == "layers.0"
    first = next(call for call in reel.calls if call.name == "embed")
    assert any("x = self.embed(t)" in frame for frame in reel.stacks[first.stack])


def test_what_was_saved_by_name_is_read_with_its_gradient():
    reel = read(FIXTURES / "debug/step1")
    assert [(r.site.name, r.site.slot, r.site.kind) for r in reel.records()] == [
        ("probe_point", "value.y", "saved"),
        ("probe_point", "value.list.0", "saved"),
        ("probe_point", "grad.y", "saved"),
    ]
    assert reel.calls[0].args["list"][1:] == [3, "text"]
