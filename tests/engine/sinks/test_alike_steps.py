"""Steps that are alike share what is written of them: each must be written as by a sink that never saw another step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.sinks.reels import partials_of, plan_for, reels, told
from trainprobe.engine.dumps import entry_text, layout, record_log, shared
from trainprobe.engine.dumps.shared import Steady, pattern_of
from trainprobe.engine.records import Call, Opaque, Place, Reel, Value
from trainprobe.engine.sinks import dump, jsonl
from trainprobe.engine.stats.partials import PARTIALS, finish

compiled = pytest.mark.skipif(shared.native is None, reason="the compiled parts are not built")


def reel(step, change=lambda reel: None):
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
    made = Reel(
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


def _poison(reel):
    reel.partials[0, PARTIALS.index("nan")] = 1


def _empty(reel):
    reel.partials[0] = 0


def _overflow(reel):
    reel.partials[0, PARTIALS.index("sum")] = np.inf


def _swap(reel):
    reel.calls[0].args = [reel.values[0], reel.values[4], reel.values[3]]


def _again(reel):
    reel.calls.append(Call("op", "Functional.linear", 0, "forward", micro=0, parent=reel.calls[0], stack=1))


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
    "std": lambda r: _set(r, wanted=("norm", "std", "nan")),
    "fewer statistics": lambda r: _set(r, wanted=("norm",)),
    "no statistics": lambda r: _set(r, wanted=()),
    "checksums": lambda r: _set(r, checksums=np.arange(6, dtype=np.uint64)),
    "crc": lambda r: _set(r, crc32={1: "0badcafe"}),
    "histogram": lambda r: _set(r, histograms={1: ([0.0, 1.0], [3])}),
    "quantiles": lambda r: _set(r, quantiles={1: [0.5]}),
    "level": lambda r: _set(r, level="L1"),
    "framework": lambda r: _set(r, framework="mindspore"),
    "notes": lambda r: _set(r, notes=["not seen"]),
    "place": lambda r: _set(r, place=Place(0, 2, {"dp": (0, 2)})),
    "values of another step": lambda r: _set(r, calls=reel(77).calls),
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
    """Write each step with sinks of its own."""
    folder.mkdir()
    out, log = {}, b""
    for i, step in enumerate(steps):
        step.shared = None
        found = written(folder / str(i), [step], **fields)
        log += found.pop("rank0/records.jsonl")
        out |= found
    return {**out, "rank0/records.jsonl": log}


@pytest.mark.parametrize("nan_tokens", [False, True], ids=["strict", "bare"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_that_differs_is_written_as_if_none_had_come_before(tmp_path, change, nan_tokens):
    steps = [reel(0), reel(1, change), reel(2, change), reel(3), reel(4)]
    together = written(tmp_path / "together", steps, nan_tokens=nan_tokens)
    assert together == alone(tmp_path / "alone", steps, nan_tokens=nan_tokens)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_compiled_parts_write_what_their_twins_write(tmp_path, monkeypatch, change):
    steps = [reel(0), reel(1), reel(2, change)]
    with_them = written(tmp_path / "with", steps)
    for module in (shared, entry_text, record_log, layout):
        monkeypatch.setattr(module, "native", None)
    assert with_them == alone(tmp_path / "without", steps)


@compiled
def test_steps_that_differ_in_nothing_but_numbers_have_one_pattern():
    first = pattern_of(reel(0))
    assert pattern_of(reel(1), first) is first
    assert pattern_of(reel(2, _poison), first) is first


IN_THE_CALLS = [name for name in list(CHANGES)[1 : list(CHANGES).index("no parameters") + 1] if name != "stacks"]


@compiled
@pytest.mark.parametrize("name", IN_THE_CALLS)
def test_what_differs_in_the_calls_makes_another_pattern(name):
    first = pattern_of(reel(0))
    assert pattern_of(reel(1, CHANGES[name]), first) is not first


@compiled
def test_values_that_two_steps_share_make_another_pattern():
    before, now = reel(0), reel(1)
    now.calls[2].args = [before.values[3]]
    first = pattern_of(before)
    assert pattern_of(now, first) is not first
    twice = reel(2)
    twice.calls = before.calls
    assert pattern_of(twice, first) is not first


@compiled
def test_alike_steps_share_the_calls_of_the_first_and_keep_their_own_numbers():
    steady = Steady()
    steps = [reel(number) for number in range(3)]
    for step in steps:
        steady.settle(step)
    assert all(step.calls is steps[0].calls and step.values is steps[0].values for step in steps)
    assert len({pattern_of(step) for step in steps}) == 1
    for number, step in enumerate(steps):
        assert [told(a) for a in step.records()] == [told(b) for b in reel(number).records()]


@compiled
@pytest.mark.parametrize("name", IN_THE_CALLS)
def test_a_step_that_differs_keeps_its_calls_and_lends_them_to_the_next(name):
    steady = Steady()
    first, other, again, back = reel(0), reel(1, CHANGES[name]), reel(2, CHANGES[name]), reel(3)
    own = other.calls
    for step in (first, other, again, back):
        steady.settle(step)
    assert other.calls is own
    assert again.calls is own
    assert back.calls is not own


@compiled
def test_steps_of_other_programs_are_not_compared():
    steady = Steady()
    dumped, monitored, dumped_again = reel(0), reel(1), reel(2)
    monitored.programs = ("monitor",)
    for step in (dumped, monitored, dumped_again):
        steady.settle(step)
    assert monitored.calls is not dumped.calls
    assert dumped_again.calls is dumped.calls


@compiled
def test_a_step_can_be_compared_while_it_is_logged():
    made = reel(0)
    alone = shared.native.log_calls(made.calls, record_log._quoted, record_log._leaf_text)[:4]
    compared = []

    def text_of(leaf):
        compared.append(shared.native.calls_alike(made.calls, reel(1).calls, Opaque))
        return record_log._leaf_text(leaf)

    assert shared.native.log_calls(made.calls, record_log._quoted, text_of)[:4] == alone
    assert compared
    assert all(compared)


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
    return Reel(step, made.place, made.framework, made.level, made.task, calls, values, partials, made.checksums, made.wanted)


@settings(max_examples=60, deadline=None)
@given(reels(), st.lists(st.sampled_from([0.0, -1.5, 1e-300, 3e38, np.nan, np.inf]), min_size=1, max_size=6))
def test_any_step_that_is_like_another_is_written_as_if_alone(tmp_path_factory, made, numbers):
    folder = tmp_path_factory.mktemp("alike")
    rows = len(made.partials)
    made.place = Place()
    other = partials_of([[numbers[i % len(numbers)], float(i)] for i in range(rows)])
    steps = [same_again(made, 0, made.partials), same_again(made, 1, other), same_again(made, 2, made.partials)]
    assert written(folder / "together", steps) == alone(folder / "alone", steps)


@compiled
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5), min_size=1, max_size=5
    )
)
def test_plain_numbers_are_those_of_the_portable_statistics(arrays):
    partials = partials_of(arrays)
    table, used, counts, zeros = shared.native.plain_table(partials.tobytes())
    told = finish(partials)
    at = {name: partials[:, PARTIALS.index(name)] for name in PARTIALS}
    wanted = [at["sum"], at["sumsq"], told["min"], told["max"], told["mean"], told["norm"]]
    assert table == np.array(wanted, np.float64).tobytes()
    assert [bool(used >> i & 1) for i in range(6)] == [bool(column.any()) for column in wanted]
    assert counts.decode().split(",") == [str(int(x)) for x in at["count"]]
    assert zeros.decode() == (",".join(str(int(x)) for x in at["zero"]) if at["zero"].any() else "")


@compiled
@pytest.mark.parametrize("name", ["nan", "posinf", "neginf", "m2", "exponent", "sublow"])
def test_numbers_are_not_plain_where_a_rarer_partial_is_there(name):
    partials = partials_of([[1.0], [2.0]])
    assert shared.native.plain_table(partials.tobytes()) is not None
    partials[1, PARTIALS.index(name)] = 1
    assert shared.native.plain_table(partials.tobytes()) is None
    assert shared.native.plain_table(b"") is None
