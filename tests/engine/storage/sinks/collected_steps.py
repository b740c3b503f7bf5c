"""Collected steps for tests: a realistic one by hand, and any by chance."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from trainprobe.engine.core.records import Call, Opaque, Place, Record, StepData, Value
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.stats.partials import PARTIALS


def partials_of(arrays: list[Any]) -> np.ndarray:
    """Reduce arrays by the definition of the partials, in float64."""
    rows = np.zeros((len(arrays), len(PARTIALS)))
    at = {name: i for i, name in enumerate(PARTIALS)}
    for row, array in zip(rows, arrays, strict=True):
        x = np.asarray(array, np.float64).ravel()
        finite = x[np.isfinite(x)]
        numbers = x[~np.isnan(x)]
        told = {
            "count": x.size,
            "nan": np.isnan(x).sum(),
            "posinf": (x == np.inf).sum(),
            "neginf": (x == -np.inf).sum(),
            "zero": (x == 0).sum(),
            "min": numbers.min() if numbers.size else np.inf,
            "max": numbers.max() if numbers.size else -np.inf,
            "sum": finite.sum(),
            "sumsq": (finite * finite).sum(),
        }
        for name, number in told.items():
            row[at[name]] = number
    return rows


def small_step(step: int = 0, place: Place | None = None, **about: Any) -> StepData:
    """One module with one op in it, forward and backward, a parameter's gradient and a scalar."""
    rng = np.random.default_rng(step)
    arrays = [rng.normal(size=(2, 3)).astype(np.float32) for _ in range(5)]
    arrays[3][0, 0] = np.nan
    values = [Value(i, "torch.float32", (2, 3), requires_grad=i != 3) for i in range(5)]
    block = Call("module", "layers.0", 0, "forward", cls="Block", micro=0, stack=0)
    block.args, block.kwargs, block.out = [values[0]], {"scale": 0.5}, values[1]
    block.params = {"weight": values[2]}
    op = Call("op", "Functional.linear", 0, "forward", micro=0, parent=block, stack=1)
    op.args, op.kwargs, op.out = [values[0], values[2], None], {}, values[1]
    back = Call("op", "Functional.linear", 0, "backward", micro=0, parent=block)
    back.args, back.out = [values[3]], [values[4], None]
    block_back = Call("module", "layers.0", 0, "backward", cls="Block", micro=0)
    block_back.args, block_back.out = [values[3]], [values[4]]
    gradient = Call("parameter", "layers.0", 0, "backward", cls="Block", micro=0)
    gradient.params = {"weight": values[4]}
    about.setdefault("level", "mix")
    about.setdefault("task", "statistics")
    return StepData(
        step=step,
        place=place or Place(),
        framework="pytorch",
        calls=[block, op, back, gradient, block_back],
        values=values,
        partials=partials_of(arrays),
        scalars={"loss": 2.5 / (step + 1)},
        stacks=[["File train.py, line 7, in forward, \n x = block(x)"], ["File model.py, line 3, in linear, \n y"]],
        **about,
    )


def plan_for(folder: Any, **fields: Any) -> Plan:
    """Return a plan that writes to `folder`."""
    return Plan(output=folder, **({"level": "L0"} | fields))


def told(record: Record) -> tuple[Any, ...]:
    """Return what a record says in a form where NaN equals NaN."""
    values = {name: "nan" if math.isnan(x) else x for name, x in record.values.items()}
    return (record.step, record.place, record.site, record.dtype, tuple(record.shape), values, record.note)


# ---- by chance -----------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45])
NAMES = st.sampled_from(["layers.0.mlp", "a", "head", "löwe.1"])
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5)


@st.composite
def collected_steps(draw: st.DrawFn) -> StepData:
    """Any step_data: calls of all sorts with trees of values, scalars and opaque leaves."""
    arrays = draw(st.lists(st.lists(NUMBERS, max_size=4), min_size=1, max_size=6))
    values = [
        Value(
            row,
            draw(st.sampled_from(["torch.float32", "torch.bfloat16", "torch.int64"])),
            (len(array),),
            requires_grad=draw(st.sampled_from([None, True, False])),
            note=draw(st.none() | st.text(max_size=5)),
            extra=draw(st.none() | st.just({"placements": [{"Shard": {"dim": 0}}]})),
        )
        for row, array in enumerate(arrays)
    ]
    values.append(Value(-1, "torch.float8_e4m3fn", (2,), note="no statistics for float8"))
    leaf = st.sampled_from(values) | SCALARS | st.just(Opaque("torch.Size", [1, 2])) | st.just(Opaque("slice", [0, None, 1]))
    trees = st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
    )
    calls = [_any_call(draw, number, trees, values) for number in range(draw(st.integers(0, 6)))]
    return StepData(
        step=draw(st.integers(0, 10**6)),
        place=draw(st.sampled_from([Place(), Place(3, 8, {"tp": (1, 2), "dp": (1, 4)})])),
        framework="pytorch",
        level="mix",
        task="statistics",
        calls=calls,
        values=values,
        partials=partials_of(arrays),
        checksums=draw(st.none() | st.just(np.arange(len(arrays), dtype=np.uint64) * np.uint64(0xFFFFFFFFFFF))),
        statistics=draw(st.sampled_from([("max", "min", "mean", "norm"), ("norm", "nan", "zero"), ("max",)])),
        scalars=draw(st.dictionaries(st.sampled_from(["loss", "lr"]), st.floats())),
        complete=draw(st.booleans()),
    )


def _any_call(draw: st.DrawFn, number: int, trees: Any, values: list[Value]) -> Call:
    kind = draw(st.sampled_from(["module", "op", "parameter", "collective", "saved"]))
    phase = draw(st.sampled_from(["forward", "backward"]))
    if kind == "op" and draw(st.booleans()):
        phase = "optimizer"
    if kind == "parameter":
        phase = "backward"
    cls = "Block" if kind in {"module", "parameter"} else ""
    call = Call(kind, draw(NAMES), number, phase, cls=cls, micro=draw(st.sampled_from([None, 0, 1])))
    if kind == "saved":
        call.args = draw(trees)
    elif kind == "parameter":
        call.params = {"weight": draw(st.sampled_from(values))}
    else:
        call.args = draw(st.lists(trees, max_size=3))
        call.out = draw(st.lists(trees, max_size=3) if phase == "backward" else trees)
        if phase != "backward":
            call.kwargs = draw(st.dictionaries(KEYS, trees, max_size=2))
            call.params = {"weight": draw(st.sampled_from(values))} if kind == "module" else None
    return call


def stand_in(**fields: Any) -> Any:
    """Return an object with these attributes."""
    return SimpleNamespace(**fields)
