"""What is recorded of the calls of a step is what torch's own modes and hooks see of the same step, bit for bit."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import trainprobe
from tests import zoo
from tests.lockstep import bits_of, one_step, seed_all
from trainprobe.engine.compiled import recording
from trainprobe.engine.core.records import Value
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.catalog import op_name
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_FILE
from trainprobe.engine.storage.dumps.tensor_store import SafetensorsReader

CASES = (
    *("residual_gpt", "checkpoint_reentrant", "structured_outputs", "inplace_relu", "data_writes", "large_views"),
    *("odd_dtypes", "custom_function", "keyword_inputs"),
)
Seen = dict[str, list[dict[str, Any]]]  # name → for each call, side → what went in or came out


def copied(x: Any) -> Any:
    """Return a tree with copies of its tensors as they are now."""
    if isinstance(x, Tensor):
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return x.detach().clone()
    if isinstance(x, tuple) and hasattr(x, "_asdict"):
        return copied(x._asdict())
    if isinstance(x, list | tuple):
        return [copied(item) for item in x]
    return {key: copied(item) for key, item in x.items()} if isinstance(x, dict) else x


class Ops(TorchFunctionMode):
    """Keeps what goes into each torch call and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = defaultdict(list)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = op_name(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            own = (kwargs or {}).get("generator")
            state = torch.get_rng_state() if own is None else own.get_state()
        call = {"args": copied(args), "kwargs": copied(kwargs or {})}
        self.seen[name.name].append(call)
        out = func(*args, **(kwargs or {}))
        call["out"] = copied(out)
        after = {**{str(i): x for i, x in enumerate(args)}, **(kwargs or {})}
        call["params"] = {"generator": state, "written": copied(after)}
        return out


def modules_seen(model: torch.nn.Module) -> Seen:
    """Have torch's hooks keep what goes into each module and what comes out."""
    seen: Seen = defaultdict(list)
    running: list[dict[str, Any]] = []

    def begins(name, module, args, kwargs):
        own = {short: p for short, p in module._parameters.items() if p is not None}
        running.append({"args": copied(args), "kwargs": copied(kwargs), "params": copied(own)})
        seen[name].append(running[-1])

    def ends(module, args, kwargs, out):
        running.pop()["out"] = copied(out)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *told, name=name: begins(name or "root", *told), with_kwargs=True)
        module.register_forward_hook(ends, with_kwargs=True)
    return seen


def start(name: str):
    case = zoo.load(name)
    seed_all()
    model = case.build()
    return case, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def by_torch(name: str) -> dict[str, Seen]:
    """Return what torch's own mode and hooks see of a step, by kind of call."""
    case, model, optimizer = start(name)
    modules = modules_seen(model)
    with Ops() as ops:
        one_step(case, model, optimizer, 0)
    return {"module": modules, "op": ops.seen}


def pairs(recorded: Any, true: Any):
    """Yield each recorded Value with the tensor that it is of."""
    if isinstance(recorded, Value):
        yield recorded, true
    elif isinstance(recorded, list):
        for i, item in enumerate(recorded):
            yield from pairs(item, true[i])
    elif isinstance(recorded, dict):
        for key, item in recorded.items():
            yield from pairs(item, true[key] if isinstance(true, dict) else getattr(true, key))


def check_numbers(value: Value, t: Tensor, numbers: dict[str, Any]) -> None:
    """Compare dtype, shape and extremes."""
    assert (value.dtype, tuple(value.shape)) == (str(t.dtype), tuple(t.shape))
    if value.row >= 0 and t.numel() and not t.is_complex() and (wide := t.double()).isfinite().all():
        assert (numbers["max"][value.row], numbers["min"][value.row]) == (float(wide.max()), float(wide.min()))


def same_bits(array: np.ndarray, t: Tensor) -> bool:
    """Tell whether what was read from a file has the bits of a tensor; float8 is read as float32, which holds it exactly."""
    if t.is_floating_point() and t.itemsize == 1:
        return np.array_equal(array, t.float().numpy())
    return bits_of(t).endswith(np.ascontiguousarray(array).tobytes())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("level", "task"), [("mix", "statistics"), ("L1", "tensor")])
def test_what_goes_in_and_comes_out_of_each_call_is_what_torch_shows(level, task, name, tmp_path):
    expected = by_torch(name)
    case, model, optimizer = start(name)
    with trainprobe.watch(model, optimizer, output=tmp_path, level=level, task=task, on_error="raise") as probe:
        probe.begin_step()
        one_step(case, model, optimizer, 0)
        step_data = probe.end_step()
        assert step_data is not None
        probe.flush()
    numbers, saved = step_data.numbers(), tmp_path / "step0" / "rank0" / SAFETENSORS_FILE
    reader = SafetensorsReader(saved) if task == "tensor" else None
    checked: Counter[str] = Counter()
    again: set[tuple[str, str]] = set()  # what is recomputed may have a number of its own, which shifts those after it
    recorded: Counter[tuple[str, str]] = Counter()
    for call in step_data.calls:
        if call.phase == "recompute":
            again.add((call.kind, call.name))
        if call.phase != "forward" or call.kind not in expected or (call.kind, call.name) in again:
            continue
        recorded[call.kind, call.name] += 1
        true = expected[call.kind][call.name][call.call]
        for side in ("args", "kwargs", "params", "out"):
            for value, t in pairs(getattr(call, side), true.get(side)):
                if call.kind == "module" or value is not (call.params or {}).get("generator"):  # a state has no statistics
                    check_numbers(value, t, numbers)
                checked[side] += 1
                if reader is not None and value.tensor is not None:
                    array = reader.array(value.tensor)
                    assert array.size == t.numel() and same_bits(array, t), (call.name, side)
                    checked["saved"] += 1
    for (kind, called), count in recorded.items():
        assert (kind, called) in again or count == len(expected[kind][called]), called
    if level == "mix":
        assert {called for kind, called in recorded if kind == "module"} == set(expected["module"])
    assert checked["args"] > 5 and checked["out"] > 5 and (checked["saved"] > 10) == (task == "tensor")


def test_a_call_stack_is_that_of_the_traceback():
    here, stacks = traceback.extract_stack(), Stacks()
    assert [stacks.capture(-1, 0, 1), stacks.capture(-1, 0, 1)] == [0, 1]  # from two places of this line
    lines = stacks.text()
    expected = [(f.filename, f.name) for f in reversed(here) if "trainprobe/" not in f.filename]
    found = [(line.split(", line ")[0].removeprefix("File "), line.split(", in ")[1].split(",")[0]) for line in lines[0]]
    assert [file for file, _ in found] == [file for file, _ in expected] and len(found) > 5
    assert all(said.endswith(name) for (_, said), (_, name) in zip(found, expected, strict=True))


def test_the_consumers_of_an_edge_are_those_that_the_graph_shows():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    plus_one = y + 1
    product = plus_one * y
    z = product + x
    graph = recording.Graph()
    graph.visit([z.grad_fn], 0)
    leaf = y.grad_fn.next_functions[0]
    assert {(node, i) for node, i in graph.consumers((y.grad_fn, 0), 0)} == {(plus_one.grad_fn, 0), (product.grad_fn, 1)}
    assert {(node, i) for node, i in graph.consumers(leaf, 0)} == {(y.grad_fn, 0), (z.grad_fn, 1)}
    assert [node for node, _ in graph.consumers((y.grad_fn, 0), product.grad_fn._sequence_nr())] == [product.grad_fn]
