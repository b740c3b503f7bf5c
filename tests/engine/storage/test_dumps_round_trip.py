"""What is written is what is read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings

import trainprobe
from tests.engine.storage.sinks.collected_steps import collected_steps, plan_for, small_step, told
from trainprobe.engine.core.records import Opaque, Place, Value
from trainprobe.engine.core.step_data import entry_name, numbers_of_rows, parent_name
from trainprobe.engine.storage.dumps import read
from trainprobe.engine.storage.dumps.record_log import decode, encode
from trainprobe.engine.storage.sinks import dump


def written(step_data, **fields):
    with tempfile.TemporaryDirectory() as folder:
        sink = dump.open(Path(folder), plan_for(folder, **fields), step_data.place)
        sink.write(step_data)
        sink.close()
        return read(Path(folder) / f"step{step_data.step}/rank{step_data.place.rank}")


@settings(max_examples=60)
@given(collected_steps())
def test_a_step_that_went_through_a_dump_has_the_same_records(step_data):
    again = written(step_data)
    assert [told(r) for r in again.records()] == [told(r) for r in step_data.records()]


@settings(max_examples=15)
@given(collected_steps())
def test_bare_nan_tokens_are_read_like_the_strings_that_stand_for_them(step_data):
    assert [told(r) for r in written(step_data, nan_tokens=True).records()] == [told(r) for r in step_data.records()]


@settings(max_examples=60)
@given(collected_steps())
def test_a_step_that_went_through_the_record_log_is_the_same_down_to_its_partials(step_data):
    line = encode(step_data)
    again = decode(line)
    assert line.count(b"\n") == 1
    assert [told(r) for r in again.records()] == [told(r) for r in step_data.records()]
    assert again.partials.tobytes() == (step_data.partials + 0.0).tobytes() or (again.partials == step_data.partials).all()
    assert [tree_of(call.args) for call in again.calls] == [tree_of(call.args) for call in step_data.calls]


def tree_of(tree):
    if isinstance(tree, Value):
        return ("value", tree.dtype, tree.shape, tree.requires_grad, tree.note, tree.extra)
    if isinstance(tree, list):
        return [tree_of(item) for item in tree]
    if isinstance(tree, dict):
        return {key: tree_of(item) for key, item in tree.items()}
    return repr(tree) if isinstance(tree, (float, Opaque)) else tree


def test_parents_stacks_micro_batches_and_the_place_survive_a_dump():
    step_data = small_step(step=4, place=Place(2, 4, {"tp": (0, 2)}), notes=("one thing was not seen",))
    again = written(step_data)
    assert [entry_name(call) for call in again.calls] == [entry_name(call) for call in step_data.calls]
    assert [parent_name(call) for call in again.calls] == [parent_name(call) for call in step_data.calls]
    assert [again.stacks[call.stack] if call.stack >= 0 else None for call in again.calls] == [
        step_data.stacks[call.stack] if call.stack >= 0 else None for call in step_data.calls
    ]
    assert [call.micro for call in again.calls] == [0] * 5
    assert (again.step, again.place, tuple(again.notes)) == (4, step_data.place, ("one thing was not seen",))


def test_a_recomputed_forward_is_in_the_record_log_and_not_in_the_dump():
    step_data = small_step()
    step_data.calls[1].phase = "recompute"
    assert len(written(step_data).calls) == 4
    assert [call.phase for call in decode(encode(step_data)).calls][1] == "recompute"


def test_two_calls_with_one_name_are_both_kept():
    step_data = small_step()
    step_data.calls[1].call = step_data.calls[2].call = 7
    step_data.calls.insert(2, step_data.calls[1])
    assert [entry_name(call) for call in written(step_data).calls][1:3] == [
        "Functional.linear.7.forward",
        "Functional.linear.8.forward",
    ]


@pytest.mark.parametrize("again", [written, lambda step_data: decode(encode(step_data))], ids=["dump", "record log"])
def test_histograms_and_quantiles_stay_with_their_values(again):
    step_data = small_step(histograms={1: ([-1.0, 0.0, 1.0], [2, 4])}, quantiles={1: np.array([0.5, np.nan])})
    found = again(step_data)
    row = next(r for r in found.calls if r.kind == "module").out
    row = (row[0] if isinstance(row, list) else row).row
    assert [list(part) for part in found.histograms[row]] == [[-1.0, 0.0, 1.0], [2, 4]]
    np.testing.assert_array_equal(found.quantiles[row], [0.5, np.nan])


def test_a_row_whose_checksum_was_not_asked_for_has_none(tmp_path):
    model = torch.nn.Linear(3, 2)
    plan = {"level": "L0", "audit": {"every": 1}, "sinks": ["dump", "memory"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, plan=plan, output=tmp_path / "run") as probe:
        probe.begin_step()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        step_data = probe.end_step()
        probe.flush()
    dump = orjson.loads((tmp_path / "run" / "step0" / "rank0" / "dump.json").read_bytes())
    leaf = dump["data"]["Module.root.Linear.forward.0"]["output"][0]
    assert "checksum" not in leaf and isinstance(leaf["Max"], float)
    told = numbers_of_rows(step_data)["checksum"]
    assert None in told and any(told)
