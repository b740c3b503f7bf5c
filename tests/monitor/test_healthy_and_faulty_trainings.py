"""The rules on real trainings: silent on healthy ones, and right about planted faults."""

import pytest
import torch
from small_training import train

import trainprobe
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.watcher import Watcher

torch.set_num_threads(1)


def judge(frames, rules=None):
    watcher = Watcher(make_rules(rules))
    return [finding for frame in frames for finding in watcher.judge(frame)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "rate"), [(0, 1e-3), (2, 3e-3)])
def test_no_rule_fires_in_300_steps_of_a_healthy_training(seed, rate):
    assert judge(train(seed, 300, rate)) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"dropout": 0.0}, {"layers": 8}, {"width": 64, "heads": 2}])
def test_no_rule_fires_in_a_healthy_training_of_another_shape(shape):
    assert judge(train(1, 300, **shape)) == []


def test_a_nan_in_one_activation_is_located_in_its_module():
    def tamper(step, model, _):
        if step == 20:
            model.layers[2].fc1.register_forward_hook(
                lambda m, i, o: o.index_fill(0, torch.tensor([0]), float("nan")), prepend=True
            )

    found = judge(train(steps=25, tamper=tamper))
    assert (found[0].rule, found[0].step, found[0].site.name) == ("nonfinite", 20, "layers.2.fc1")
    assert "forward pass" in found[0].message


def test_a_nan_in_one_gradient_is_located_in_its_parameter():
    def tamper(step, model):
        if step == 20:
            model.layers[1].qkv.weight.grad[0, 0] = float("nan")

    found = judge(train(steps=25, tamper_gradients=tamper))
    assert found[0].rule == "nonfinite"
    assert found[0].step == 20


def test_a_batch_whose_loss_is_a_hundredfold_is_a_spike():
    found = judge(train(steps=120, tamper_loss=lambda step, loss: loss * (100 if step == 100 else 1)))
    assert [(f.rule, f.step) for f in found] == [("spike", 100)]


def test_a_parameter_that_the_optimizer_does_not_hold_is_frozen():
    def tamper(step, model, optimizer):
        if step == 0:
            group = optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not model.layers[2].fc2.weight]

    found = judge(train(steps=30, tamper=tamper))
    assert [(f.rule, f.site.name) for f in found] == [("frozen", "layers.2.fc2.weight")]


def test_a_detached_branch_leaves_a_layer_dead():
    def tamper(step, model, _):
        if step == 10:
            model.layers[1].drop.p = 1.0

    found = judge(train(steps=60, tamper=tamper))
    dead = [f for f in found if f.rule == "dead"]
    assert dead
    assert dead[0].site.name == "layers.1.drop"
    assert dead[0].step == 29


def test_a_stack_without_normalisation_and_with_small_weights_vanishes():
    def tamper(step, model, _):
        if step == 0:
            with torch.no_grad():
                for layer in model.layers:
                    layer.forward = lambda x, m=layer: m.fc2(torch.tanh(m.fc1(x)))
                    for p in (layer.fc1.weight, layer.fc2.weight):
                        p.mul_(2)

    found = judge(train(steps=30, tamper=tamper, layers=8))
    flow = [f for f in found if f.rule == "flow"]
    assert flow
    assert "vanishes towards the first layer" in flow[0].message


def test_a_learning_rate_a_thousand_times_too_large_is_an_update_out_of_range():
    def tamper(step, model, optimizer):
        if step >= 30:
            optimizer.param_groups[0]["lr"] *= 1000

    frames = list(train(steps=60, tamper=tamper))
    assert [f.rule for f in judge(frames)] == ["spike"]  # the incident is one finding, of what was seen first
    assert "update_ratio" in {f.rule for f in judge(frames, ["update_ratio"])}


def test_a_diverging_loss_is_drift():
    def tamper(step, model, optimizer):
        if step >= 100:
            for group in optimizer.param_groups:
                group["maximize"] = True

    found = judge(train(steps=220, tamper=tamper))
    assert any(f.rule == "drift" and f.site.name == "loss" for f in found)


def test_a_nan_that_the_loss_makes_is_blamed_on_the_loss_whatever_else_is_collected(tmp_path):
    for collected in ({}, {"activation_gradients": True, "gradients": {"unclipped": True}}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        plan = {"level": "off", "sinks": [], "output": tmp_path / "out", "on_existing": "replace", "monitor": collected or True}
        with trainprobe.watch(model, optimizer, plan=plan) as probe:
            for step in range(3):
                with probe.step(step):
                    optimizer.zero_grad()
                    out = model(torch.ones(2, 4)).square()
                    loss = (out - (2 * out.detach() if step == 2 else 0)).mean().log()  # the logarithm of less than nothing
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    probe.note("loss", loss.detach())
        found = [f for f in probe.findings if f.rule == "nonfinite"]
        assert [(f.step, f.site.name) for f in found] == [(2, "loss")]
        assert "The forward pass was finite" in found[0].message
