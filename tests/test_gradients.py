"""The gradients that the probe reads beside the graph are those that torch's own full-backward hooks report."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor

import trainprobe
from tests import zoo
from tests.lockstep import bits_of, one_step, seed_all
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call, StepData, Value
from trainprobe.engine.stats import fingerprint

# full-backward hooks cannot be put on these, or say something else there by their nature
WITHOUT_ORACLE = {
    "functional_transforms": "full-backward hooks do not work under vmap",
    "second_order": "hooks fire in both backwards, the probe records the first",
    "under_no_grad": "inference mode refuses the identity nodes that hooks insert",
}
CASES = [n for n in zoo.NAMES if n not in WITHOUT_ORACLE and not zoo.load(n).in_place]

Slot = tuple[str, str, int]  # module name, "output" or "input" gradient, index


def start(name):
    case = zoo.load(name)
    seed_all()
    model = case.build()
    return case, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def probed(name, folder, **plan) -> tuple[StepData, torch.nn.Module]:
    case, model, optimizer = start(name)
    with trainprobe.watch(model, optimizer, output=folder, level="L0", **plan) as probe:
        probe.begin_step()
        one_step(case, model, optimizer, 0)
        step_data = probe.end_step()
    assert step_data is not None
    return step_data, model


def hooked(name) -> dict[Slot, list[float]]:
    """Train the same step under torch's own hooks; return the norms of all gradients, by slot."""
    case, model, optimizer = start(name)
    found: dict[Slot, list[float]] = defaultdict(list)

    def hook(at):
        def report(module, inputs, outputs):
            for side, gradients in (("input", inputs), ("output", outputs)):
                for i, gradient in enumerate(gradients):
                    if isinstance(gradient, Tensor):
                        found[at, side, i].append(float(gradient.detach().double().abs().square().sum().sqrt()))

        return report

    for at, module in model.named_modules():
        if at:
            module.register_full_backward_hook(hook(at))
    one_step(case, model, optimizer, 0)
    return found


def told(step_data: StepData) -> dict[Slot, str]:
    """Return the reasons why a module gradient is not its own contribution, by slot."""
    return {
        (call.name, side, i): value.note
        for call in step_data.calls
        if call.kind == "module" and call.phase == "backward"
        for side, tree in (("input", call.out), ("output", call.args))
        for i, value in enumerate(tree)
        if isinstance(value, Value) and value.note is not None
    }


def gradients_of(step_data: StepData) -> dict[Slot, list[float]]:
    """Return the norms of all module gradients in a step, by slot; those that come with a note instead are left out."""
    norms = step_data.numbers()["norm"]
    found: dict[Slot, list[float]] = defaultdict(list)
    for call in step_data.calls:
        if call.kind == "module" and call.phase == "backward":
            for side, tree in (("input", call.out), ("output", call.args)):
                for i, value in enumerate(tree):
                    if isinstance(value, Value) and value.note is None:
                        found[call.name, side, i].append(float(norms[value.row]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_at_module_outputs_and_inputs_equal_those_of_full_backward_hooks(name, tmp_path):
    expected = hooked(name)
    step_data, _ = probed(name, tmp_path / "out")
    found = gradients_of(step_data)
    wrong = {
        slot: (sorted(norms), sorted(found.get(slot, [])))
        for slot, norms in expected.items()
        if slot not in told(step_data)
        if len(norms) != len(found.get(slot, [])) or not np.allclose(sorted(norms), sorted(found[slot]), rtol=1e-4, atol=1e-9)
    }
    assert wrong == {}


@pytest.mark.parametrize("name", CASES)
def test_no_module_gradient_is_recorded_that_hooks_do_not_see(name, tmp_path):
    expected = hooked(name)
    step_data, _ = probed(name, tmp_path / "out")
    plain = {slot for slot in gradients_of(step_data) if slot[0] in {at for at, _, _ in expected}}
    assert plain <= set(expected)


def test_a_gradient_that_cannot_be_told_apart_is_marked_and_nothing_else_is(tmp_path):
    marked = {n: {slot[0] for slot in told(probed(n, tmp_path / n)[0])} for n in CASES}
    assert {n: names for n, names in marked.items() if names} == {
        "custom_function": {"identity"},
        "recurrent": {"attention"},  # query, key and value are one tensor
        "odd_dtypes": {"passes"},
        "tied_weights": {"layers.0.drop", "layers.1.drop"},  # a dropout of zero hands on its input
    }


def parameter_calls(step_data: StepData) -> list[Call]:
    return [call for call in step_data.calls if call.kind == "parameter" and call.phase == "backward"]


@pytest.mark.parametrize("name", [n for n in zoo.NAMES if zoo.load(n).micro == 1 and n not in ("user_hooks", "second_order")])
def test_parameter_gradients_have_the_bits_of_p_grad(name, tmp_path):
    step_data, model = probed(name, tmp_path / "out", summary="checksum")
    assert step_data.checksums is not None
    expected = {n: fingerprint(p.grad.numpy()) for n, p in model.named_parameters() if p.grad is not None}
    found = {
        short if call.name == ROOT else f"{call.name}.{short}": int(step_data.checksums[value.row])
        for call in parameter_calls(step_data)
        for short, value in call.params.items()
    }
    assert found == expected


def test_with_accumulation_each_micro_batch_leaves_its_own_parameter_gradient(tmp_path):
    step_data, model = probed("gradient_accumulation", tmp_path / "out")
    sums = step_data.numbers()["mean"]
    means = [float(sums[call.params["weight"].row]) for call in parameter_calls(step_data) if call.name == "0"]
    weight = model.get_submodule("0").weight
    assert len(means) == 3
    assert sum(means) == pytest.approx(float(weight.grad.double().mean()), rel=1e-4)


def test_parameters_that_arrive_in_turns_share_the_call_of_their_number(tmp_path):
    """The weight arrives twice before the bias does, as where several threads run a backward each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with trainprobe.watch(model, output=tmp_path, level="L0", console=False) as probe, probe.step():
        losses = [model(torch.full((1, 3), float(i))).square().sum() for i in range(3)]
        for chosen in (model.weight, model.bias):
            for loss in losses:
                loss.backward(inputs=[chosen], retain_graph=True)
    entries = json.loads((tmp_path / "step0/rank0/dump.json").read_text())["data"]
    found = {name: [*entry] for name, entry in entries.items() if "parameters_grad" in name}
    assert [*found.values()] == [["weight", "bias"]] * 3, found


def test_the_oracle_itself_changes_bits_which_is_why_the_probe_does_not_use_it():
    """Full-backward hooks change the order in which gradients are added: the reason for reading beside the graph."""

    def weights(with_hooks):
        case, model, optimizer = start("recurrent")
        if with_hooks:
            for module in model.modules():
                module.register_full_backward_hook(lambda *_: None)
        for step in range(20):
            one_step(case, model, optimizer, step)
        return [bits_of(p) for p in model.parameters()]

    assert weights(False) != weights(True)
