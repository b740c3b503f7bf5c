"""Steps with one layout share what is made of it: each must be written as by a sink that never saw another step."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainprobe
from tests.engine.storage.sinks.collected_steps import collected_steps, partials_of, plan_for
from trainprobe.engine.core import step_layout
from trainprobe.engine.core.records import Call, Feature, Opaque, Place, StepData, Value
from trainprobe.engine.core.step_layout import layout_of
from trainprobe.engine.stats.partials import PARTIALS
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.engine.storage.sinks import dump, jsonl

FEATURE = Feature("layers.0", "attention_entropy", 0, 0, np.array([0.5]))


def step_data(step, change=lambda step_data: None):
    """Return a step with a module, an op, a gradient and leaves of every sort; only its numbers depend on `step`."""
    rng = np.random.default_rng(step)
    arrays = [rng.normal(size=(2, 3)) for _ in range(6)]
    arrays[4] = np.array([True, False, step % 2 == 0])
    values = [Value(i, "torch.float32", (2, 3), requires_grad=i % 2 == 0) for i in range(6)]
    values[4] = Value(4, "torch.bool", (3,), note="a mask", extra={"placements": [{"Shard": {"dim": 0}}]})
    block = Call("module", "layers.0", 0, "forward", cls="Block", micro=0, stack=0)
    block.args, block.kwargs = [values[0], values[4], values[0]], {"scale": 0.5, "slice": Opaque("slice", [0, None, 1])}
    block.out, block.params = {"a": values[1], "b": [1, True, None, "text"]}, {"weight": values[2]}
    op = Call("op", "Functional.linear", 0, "forward", micro=0, parent=block, stack=1)
    op.args, op.out = [values[0], values[2], -0.0], values[1]
    back = Call("op", "Functional.linear", 0, "backward", micro=0, parent=block)
    back.args, back.out, back.node = [values[3]], [values[5], None], "AddmmBackward0"
    gradient = Call("parameter", "layers.0", 0, "backward", cls="Block", micro=0)
    gradient.params = {"weight": values[5]}
    made = StepData(
        step,
        Place(),
        "pytorch",
        "mix",
        "statistics",
        [block, op, back, gradient],
        values,
        partials_of(arrays),
        scalars={"loss": 1.0 / (step + 1)},
        stacks=[["File train.py, line 7"], ["File model.py, line 3"]],
    )
    change(made)
    return made


def _poison(step_data):
    step_data.partials[0, PARTIALS.index("nan")] = 1


def _empty(step_data):
    step_data.partials[0] = 0


def _overflow(step_data):
    step_data.partials[0, PARTIALS.index("sum")] = np.inf


def _swap(step_data):
    step_data.calls[0].args = [step_data.values[0], step_data.values[4], step_data.values[3]]


def _again(step_data):
    step_data.calls.append(Call("op", "Functional.linear", 0, "forward", micro=0, parent=step_data.calls[0], stack=1))


def _set(thing, **fields):
    for name, field in fields.items():
        setattr(thing, name, field)


CHANGES = {
    "numbers": lambda r: None,
    "shape": lambda r: _set(r.values[3], shape=(3, 2)),
    "dtype": lambda r: _set(r.values[1], dtype="torch.bfloat16"),
    "a bool no longer": lambda r: _set(r.values[4], dtype="torch.uint8"),
    "device": lambda r: _set(r.values[1], device="cuda:0"),
    "type": lambda r: _set(r.values[1], type="torch.nn.Parameter"),
    "requires_grad": lambda r: _set(r.values[2], requires_grad=None),
    "note": lambda r: _set(r.values[4], note="another mask"),
    "no note": lambda r: _set(r.values[4], note=None),
    "extra": lambda r: _set(r.values[4], extra={"placements": [{"Shard": {"dim": 1}}]}),
    "row": lambda r: _set(r.values[1], row=3),
    "no row": lambda r: _set(r.values[1], row=-1),
    "another value": _swap,
    "name": lambda r: _set(r.calls[0], name="layers.1"),
    "class": lambda r: _set(r.calls[0], cls="Other"),
    "call": lambda r: _set(r.calls[1], call=1),
    "phase": lambda r: _set(r.calls[1], phase="recompute"),
    "kind": lambda r: _set(r.calls[1], kind="collective"),
    "micro-batch": lambda r: _set(r.calls[1], micro=1),
    "parent": lambda r: _set(r.calls[1], parent=None),
    "stage": lambda r: _set(r.calls[1], parent="optimizer"),
    "parent that is not recorded": lambda r: _set(r.calls[1], parent=Call("module", "layers.7", 0, "forward", cls="Block")),
    "node": lambda r: _set(r.calls[2], node="MmBackward0"),
    "stack of a call": lambda r: _set(r.calls[1], stack=0),
    "stacks": lambda r: _set(r, stacks=[["File train.py, line 8"], ["File model.py, line 3"]]),
    "number of calls": _again,
    "fewer calls": lambda r: r.calls.pop(),
    "float": lambda r: _set(r.calls[0], kwargs={"scale": 0.25, "slice": Opaque("slice", [0, None, 1])}),
    "sign of zero": lambda r: _set(r.calls[1], args=[r.values[0], r.values[2], 0.0]),
    "int for float": lambda r: _set(r.calls[1], args=[r.values[0], r.values[2], 0]),
    "bool for int": lambda r: _set(r.calls[0], out={"a": r.values[1], "b": [True, True, None, "text"]}),
    "int for bool": lambda r: _set(r.calls[0], out={"a": r.values[1], "b": [1, 1, None, "text"]}),
    "text": lambda r: _set(r.calls[0], out={"a": r.values[1], "b": [1, True, None, "texts"]}),
    "key": lambda r: _set(r.calls[0], out={"c": r.values[1], "b": [1, True, None, "text"]}),
    "opaque value": lambda r: _set(r.calls[0], kwargs={"scale": 0.5, "slice": Opaque("slice", [0, None, 2])}),
    "opaque bool": lambda r: _set(r.calls[0], kwargs={"scale": 0.5, "slice": Opaque("slice", [False, None, 1])}),
    "opaque extra": lambda r: _set(r.calls[0], kwargs={"scale": 0.5, "slice": Opaque("slice", [0, None, 1], {"x": 1})}),
    "no parameters": lambda r: _set(r.calls[0], params=None),
    "nan": _poison,
    "no elements": _empty,
    "sum beyond float64": _overflow,
    "std": lambda r: _set(r, statistics=("norm", "std", "nan")),
    "fewer statistics": lambda r: _set(r, statistics=("norm",)),
    "no statistics": lambda r: _set(r, statistics=()),
    "checksums": lambda r: _set(r, checksums=np.arange(6, dtype=np.uint64)),
    "crc": lambda r: _set(r, crc32={1: "0badcafe"}),
    "histogram": lambda r: _set(r, histograms={1: ([0.0, 1.0], [3])}),
    "quantiles": lambda r: _set(r, quantiles={1: [0.5]}),
    "level": lambda r: _set(r, level="L1"),
    "framework": lambda r: _set(r, framework="mindspore"),
    "notes": lambda r: _set(r, notes=["not seen"]),
    "place": lambda r: _set(r, place=Place(0, 2, {"dp": (0, 2)})),
    "values of another step": lambda r: _set(r, calls=step_data(77).calls),
}


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written(folder, steps, **fields):
    """Write these steps one after the other with one dump and one record log; return relative path → bytes."""
    folder.mkdir()
    plan = plan_for(folder, **fields)
    sinks = [dump.open(folder, plan, Place()), jsonl.open(folder, plan, Place())]
    for step in steps:
        for sink in sinks:
            sink.write(step)
    for sink in sinks:
        sink.close()
    return files(folder)


def alone(folder, steps, **fields):
    """Write each step with sinks of its own, and with no layout known."""
    folder.mkdir()
    out, log = {}, b""
    for i, step in enumerate(steps):
        step.layout = None
        step_layout._known.clear()
        found = written(folder / str(i), [step], **fields)
        log += found.pop("rank0/records.jsonl")
        out |= found
    return {**out, "rank0/records.jsonl": log}


@pytest.mark.parametrize("nan_tokens", [False, True], ids=["strict", "bare"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_that_differs_is_written_as_if_none_had_come_before(tmp_path, change, nan_tokens):
    steps = [step_data(0), step_data(1, change), step_data(2, change), step_data(3), step_data(4)]
    together = written(tmp_path / "together", steps, nan_tokens=nan_tokens)
    assert together == alone(tmp_path / "alone", steps, nan_tokens=nan_tokens)


IN_THE_CALLS = list(CHANGES)[1 : list(CHANGES).index("no parameters") + 1]


def test_steps_that_differ_in_nothing_but_numbers_have_one_layout():
    first = layout_of(step_data(0))
    assert layout_of(step_data(1)) is first
    assert layout_of(step_data(2, _poison)) is first
    assert layout_of(step_data(3, lambda r: _set(r, scalars={"loss": np.nan}))) is first
    made = step_data(4)
    assert layout_of(made) is made.layout is first
    assert dataclasses.replace(made, calls=[]).layout is None


@pytest.mark.parametrize("name", IN_THE_CALLS)
def test_what_differs_in_the_calls_makes_another_layout(name):
    step_layout._known.clear()
    first, other = layout_of(step_data(0)), layout_of(step_data(1, CHANGES[name]))
    assert first is not other
    assert layout_of(step_data(2)) is first
    assert layout_of(step_data(3, CHANGES[name])) is other


@pytest.mark.parametrize(
    "change", [{"features": [FEATURE]}, {"scalars": {"loss": 1.0, "lr": 0.1}}], ids=["features", "scalars"]
)
def test_features_and_scalars_belong_to_the_layout_by_name(change):
    first, other = layout_of(step_data(0)), layout_of(step_data(1, lambda r: _set(r, **change)))
    assert first is not other
    moved = {"features": [dataclasses.replace(FEATURE, numbers=np.array([3.0]))]} if "features" in change else change
    assert layout_of(step_data(2, lambda r: _set(r, **moved))) is other


def test_how_many_bins_were_counted_makes_no_other_layout():
    def binned(bins):
        counts = Feature("layers.0", "exponents", 0, 0, np.ones(bins), np.arange(bins + 1.0))
        return lambda r: _set(r, features=[counts])

    first = layout_of(step_data(0, binned(3)))
    assert layout_of(step_data(1, binned(5))) is first
    several = dataclasses.replace(FEATURE, numbers=np.ones(3))
    assert layout_of(step_data(2, lambda r: _set(r, features=[several]))) is not layout_of(
        step_data(3, lambda r: _set(r, features=[FEATURE]))
    )


def test_a_layout_that_is_met_again_and_again_is_kept_through_many_others():
    usual = layout_of(step_data(0))
    for number in range(3 * step_layout.KEPT):
        layout_of(step_data(0, lambda r, number=number: _set(r.calls[0], name=f"layers.{number}")))
        assert layout_of(step_data(1)) is usual


def test_few_layouts_are_kept_and_what_was_made_of_one_goes_with_its_owner():
    class Owner:
        pass

    owner, made = Owner(), []
    kept = layout_of(step_data(0))
    assert (
        kept.derived(owner, lambda: made.append(1) or "once")
        == kept.derived(owner, lambda: made.append(2) or "twice")
        == "once"
    )
    assert made == [1]
    seen = weakref.ref(owner)
    del owner
    assert seen() is None
    for number in range(3 * step_layout.KEPT):
        layout_of(step_data(0, lambda r, number=number: _set(r.calls[0], name=f"layers.{number}")))
    assert len(step_layout._known) <= step_layout.KEPT


def same_again(made, step, partials):
    """Return a step like `made` of other objects and with other numbers."""
    twins = {}

    def tree(x):
        if isinstance(x, Value):
            kept = {name: getattr(x, name) for name in ("type", "device", "requires_grad", "note", "tensor", "extra")}
            return twins.setdefault(id(x), Value(x.row, x.dtype, x.shape, **kept))
        if isinstance(x, list):
            return [tree(item) for item in x]
        return {k: tree(v) for k, v in x.items()} if isinstance(x, dict) else x

    values = [tree(value) for value in made.values]
    calls = []
    for call in made.calls:
        twin = Call(call.kind, call.name, call.call, call.phase, cls=call.cls, micro=call.micro, stack=call.stack)
        for field in ("args", "kwargs", "out", "params"):
            setattr(twin, field, tree(getattr(call, field)))
        calls.append(twin)
    return StepData(
        step, made.place, made.framework, made.level, made.task, calls, values, partials, made.checksums, made.statistics
    )


@settings(max_examples=60, deadline=None)
@given(collected_steps(), st.lists(st.sampled_from([0.0, -1.5, 1e-300, 3e38, np.nan, np.inf]), min_size=1, max_size=6))
def test_any_step_that_is_like_another_is_written_as_if_alone(tmp_path_factory, made, numbers):
    folder = tmp_path_factory.mktemp("alike")
    rows = len(made.partials)
    made.place = Place()
    other = partials_of([[numbers[i % len(numbers)], float(i)] for i in range(rows)])
    steps = [same_again(made, 0, made.partials), same_again(made, 1, other), same_again(made, 2, made.partials)]
    assert written(folder / "together", steps) == alone(folder / "alone", steps)


def test_a_selection_leaves_the_next_run_of_the_process_whole(tmp_path):
    """The rules look at all calls of a step before the plan's selection leaves some out."""

    def calls_of(name, **plan):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan |= {"level": "L0", "monitor": True, "sinks": ["jsonl"], "console": False}
        with trainprobe.watch(model, optimizer, output=tmp_path / name, **plan) as probe, probe.step():
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        (recorded,) = read_log(tmp_path / name)
        return [(call.kind, call.name, call.phase) for call in recorded.calls]

    runs = [calls_of(f"run{i}", **plan) for i, plan in enumerate(({"entries": ["Tanh"]}, {}))]
    assert {name for kind, name, _ in runs[0]} == {"1"}
    assert {name for kind, name, _ in runs[1] if kind == "module"} >= {"0", "1", "2"}
