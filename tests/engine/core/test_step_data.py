"""The names of calls, and the records of a collected step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.storage.sinks.collected_steps import small_step
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import entry_name, parent_name


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Call("module", "layers.0", 2, "forward", cls="Block"), "Module.layers.0.Block.forward.2"),
        (Call("module", "layers.0", 2, "recompute", cls="Block"), "Module.layers.0.Block.forward.2"),
        (Call("module", "layers.0", 2, "backward", cls="Block"), "Module.layers.0.Block.backward.2"),
        (Call("parameter", "fc", 1, "backward", cls="Linear"), "Module.fc.Linear.parameters_grad.1"),
        (Call("op", "Functional.linear", 3, "forward"), "Functional.linear.3.forward"),
        (Call("op", "Functional.linear", 3, "backward"), "Functional.linear.3.backward"),
        (Call("op", "Tensor.add_", 3, "optimizer"), "Tensor.add_.3.forward"),
        (Call("collective", "Distributed.all_reduce", 0, "forward"), "Distributed.all_reduce.0.forward"),
        (Call("saved", "loss", 0, "forward"), "loss.0.debug"),
        (Call("saved", "loss", 0, "backward"), "loss_grad.0.debug"),
    ],
)
def test_a_call_is_named_as_existing_tools_name_it(call, name):
    assert entry_name(call) == name


def test_a_module_of_mindspore_is_a_cell():
    assert entry_name(Call("module", "net", 0, "forward", cls="Dense"), "mindspore") == "Cell.net.Dense.forward.0"


def test_a_backward_call_lies_in_its_parents_backward():
    block = Call("module", "a", 0, "forward", cls="A")
    assert parent_name(Call("op", "Torch.add", 0, "backward", parent=block)) == "Module.a.A.backward.0"
    assert parent_name(Call("op", "Torch.add", 0, "forward", parent="optimizer")) == "optimizer"


def test_records_come_in_the_order_of_execution_with_their_slots():
    records = list(small_step().records())
    assert [(r.site.kind, r.site.name, r.site.slot) for r in records] == [
        ("module", "layers.0", "input.0"),
        ("module", "layers.0", "parameters.weight"),
        ("module", "layers.0", "output"),
        ("op", "Functional.linear", "input.0"),
        ("op", "Functional.linear", "input.1"),
        ("op", "Functional.linear", "output"),
        ("op", "Functional.linear", "grad_output.0"),
        ("op", "Functional.linear", "grad_input.0"),
        ("parameter", "layers.0.weight", "grad"),
        ("module", "layers.0", "grad_output.0"),
        ("module", "layers.0", "grad_input.0"),
        ("scalar", "loss", "value"),
    ]


def test_the_numbers_of_a_record_are_those_of_its_value():
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32).astype(np.float64)
    record = next(small_step().records())
    expected = {"max": x.max(), "min": x.min(), "mean": x.mean(), "norm": np.linalg.norm(x)}
    assert record.values == pytest.approx(expected, rel=1e-15)


def test_a_value_that_nothing_was_reduced_of_has_no_numbers():
    step_data = small_step()
    step_data.calls[0].args = [Value(-1, "torch.float8_e4m3fn", (2,), note="float8")]
    record = next(step_data.records())
    assert (dict(record.values), record.note) == ({}, "float8")


def test_nested_outputs_carry_their_path():
    step_data = small_step()
    step_data.calls[1].out = {"logits": step_data.values[0], "cache": [step_data.values[1], {"k": step_data.values[2]}]}
    slots = [r.site.slot for r in step_data.records() if r.site.slot.startswith("output.")]
    assert slots == ["output.logits", "output.cache.0", "output.cache.1.k"]
