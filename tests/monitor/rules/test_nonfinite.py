"""The rule `nonfinite` names where the first NaN was born."""

import math
from pathlib import Path

import pytest
import torch
from frames_by_hand import Bench, value

import trainprobe
from trainprobe.monitor.rules.nonfinite import Options
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import judge_frames

NAN = math.nan


def module(name, into, out, phase="forward", call=0):
    a, b = ("input.0", "output") if phase == "forward" else ("grad_output.0", "grad_input.0")
    return [value(phase, "module", name, a, call=call, norm=into), value(phase, "module", name, b, call=call, norm=out)]


def grad(name, norm):
    return value("backward", "parameter", name, "grad", norm=norm)


def test_a_finite_step_has_no_finding():
    assert Bench("nonfinite").feed(*module("a", 1.0, 2.0), loss=1.0) == []


def test_the_origin_is_the_first_module_whose_input_was_finite_and_whose_output_was_not():
    values = [
        *module("layers.0", 1.0, 1.0),
        *module("layers.1", 1.0, NAN),
        *module("layers.2", NAN, NAN),
        grad("layers.0.w", NAN),
    ]
    (found,) = Bench("nonfinite").feed(*values, loss=NAN)
    assert (found.site.name, found.site.slot, found.severity) == ("layers.1", "output", "error")
    assert "inputs were finite, the forward pass made it" in found.message


def test_of_nested_modules_the_innermost_is_named():
    values = [*module("layers.1", 1.0, NAN), *module("layers.1.mlp", 1.0, NAN), *module("layers.1.mlp.fc2", 1.0, NAN)]
    (found,) = Bench("nonfinite").feed(*module("", 1.0, NAN), *values, *module("layers.2", NAN, NAN))
    assert found.site.name == "layers.1.mlp.fc2"


def test_a_nan_that_arises_in_the_backward_pass_is_told_from_one_in_the_forward_pass():
    forward = [*module("layers.0", 1.0, 1.0), *module("layers.1", 1.0, 1.0)]
    backward = [*module("layers.1", 1.0, NAN, "backward"), grad("layers.1.w", 1.0), *module("layers.0", NAN, NAN, "backward")]
    (found,) = Bench("nonfinite").feed(*forward, *backward, grad("layers.0.w", NAN), loss=1.0)
    assert (found.site.name, found.site.slot) == ("layers.1", "grad_input.0")
    assert "backward pass" in found.message


def test_with_gradients_alone_the_first_gradient_that_arrived_is_named():
    (found,) = Bench("nonfinite").feed(grad("layers.3.w", 1.0), grad("layers.2.w", NAN), grad("layers.1.w", NAN))
    assert found.site.name == "layers.2.w"


def test_a_parameter_that_the_optimizer_wrote_is_blamed_on_the_optimizer():
    update = value("optimizer", "parameter", "w", "update", norm=NAN)
    (found,) = Bench("nonfinite").feed(grad("w", 1.0), update)
    assert found.site.slot == "update"
    assert "the optimizer made it" in found.message


def test_a_parameter_that_was_not_finite_before_the_step_is_the_origin():
    values = [
        *module("layers.0", 1.0, 1.0),
        value("forward", "module", "layers.1", "input.0", norm=1.0),
        value("forward", "module", "layers.1", "parameters.weight", norm=NAN),
        value("forward", "module", "layers.1", "output", norm=NAN),
    ]
    (found,) = Bench("nonfinite").feed(*values)
    assert (found.site.name, found.site.slot) == ("layers.1.weight", "value")
    assert "before the step began" in found.message


def test_a_loss_that_alone_is_not_finite_is_its_own_origin():
    (found,) = Bench("nonfinite").feed(*module("a", 1.0, 1.0), loss=NAN)
    assert found.site.name == "loss"


def test_a_loss_that_is_not_finite_after_a_finite_forward_pass_is_the_origin_of_the_gradients_that_follow():
    backward = [*module("a", NAN, NAN, "backward"), grad("a.w", NAN)]
    clipped = value("optimizer", "parameter", "a.w", "grad_unclipped", norm=NAN)
    (found,) = Bench("nonfinite").feed(*module("a", 1.0, 1.0), *backward, clipped, loss=NAN)
    assert found.site.name == "loss"
    assert "The forward pass was finite" in found.message


def test_without_a_loss_a_gradient_that_comes_back_bad_is_told_as_coming_from_what_follows():
    (found,) = Bench("nonfinite").feed(*module("a", 1.0, 1.0), *module("a", NAN, NAN, "backward"), grad("a.w", NAN))
    assert (found.site.name, found.site.slot) == ("a", "grad_output.0")
    assert "the loss or the next pipeline stage" in found.message


def test_minus_infinity_alone_is_a_mask_and_no_alarm():
    masked = value("forward", "op", "Tensor.masked_fill", "output", max=1.0, min=-math.inf, norm=math.inf)
    assert Bench("nonfinite").feed(masked) == []


def test_plus_infinity_is_an_alarm():
    (found,) = Bench("nonfinite").feed(value("forward", "module", "a", "output", max=math.inf, min=0.0, norm=math.inf))
    assert found.measured == "infinity"


def test_a_nan_that_stays_is_told_once_and_again_after_a_finite_step():
    bench = Bench("nonfinite")
    steps = [bench.feed(grad("w", norm)) for norm in (1.0, NAN, NAN, NAN, 1.0, NAN)]
    assert [len(found) for found in steps] == [0, 1, 0, 0, 0, 1]


def test_infinite_gradients_under_a_loss_scale_are_a_note_and_an_error_only_when_they_stay():
    bench = Bench("nonfinite", scaler_patience=3)
    found = [bench.feed(grad("w", math.inf), loss=1.0, loss_scale=65536.0) for _ in range(5)]
    assert [[f.severity for f in step] for step in found] == [["info"], [], [], ["error"], []]


def test_a_loss_scale_that_begins_far_above_its_limit_may_take_many_steps_down():
    """Megatron begins at 2 ** 32 and halves every other step; a NaN that stays behind at low scales is found as before."""
    bench = Bench("nonfinite", scaler_patience=3)
    found = [bench.feed(grad("w", NAN), loss=1.0, loss_scale=2.0**power) for power in range(32, 16, -1) for _ in range(2)]
    assert [[f.severity for f in step] for step in found] == [["info"]] + [[]] * 31
    found = [bench.feed(grad("w", NAN), loss=1.0, loss_scale=2.0**power) for power in range(16, 11, -1)]
    assert [[f.severity for f in step] for step in found] == [[], [], [], ["error"], []]


@pytest.mark.parametrize("halves", [True, False])
def test_a_run_whose_every_step_is_skipped_is_an_error_however_high_the_scale(halves):
    bench = Bench("nonfinite", scaler_patience=3)
    for step in range(80):
        bench.feed(grad("w", math.inf), loss=1.0, loss_scale=2.0 ** (100 - step if halves else 20))
    assert [(f.step, f.severity) for f in bench.found] == [(0, "info"), (35, "error")]
    assert "The loss scaler skipped the 35 steps before it too" in bench.found[1].message


def test_a_loss_scale_that_is_raised_far_above_one_that_worked_is_an_error_as_any():
    bench = Bench("nonfinite", scaler_patience=3)
    assert bench.feed(grad("w", 1.0), loss=1.0, loss_scale=2.0**15) == []
    found = [bench.feed(grad("w", math.inf), loss=1.0, loss_scale=2.0**power) for power in range(31, 26, -1)]
    assert [[f.severity for f in step] for step in found] == [["info"], [], [], ["error"], []]


@pytest.mark.parametrize("scalars", [{"loss": NAN, "loss_scale": 1024.0}, {"loss": 1.0}])
def test_without_a_loss_scale_or_with_a_bad_loss_infinite_gradients_are_an_error_at_once(scalars):
    (found,) = Bench("nonfinite").feed(grad("w", math.inf), **scalars)
    assert found.severity == "error"


def test_a_batch_that_is_not_finite_is_the_origin_and_not_the_gradients_that_follow():
    forward = [*module("", math.inf, NAN), *module("layers.0", math.inf, NAN), *module("layers.1", NAN, NAN)]
    backward = [*module("", 1.0, NAN, "backward"), grad("layers.1.w", NAN), grad("layers.0.w", NAN)]
    (found,) = Bench("nonfinite").feed(*forward, *backward, loss=NAN)
    assert (found.site.name, found.site.slot) == ("", "input.0")
    assert "the data or an earlier step made it" in found.message
    assert "backward" not in found.message
    assert "look at the batch" in found.next


def test_a_forward_call_that_made_one_of_finite_values_is_still_named_beside_an_infinite_input():
    values = [*module("mask", math.inf, 1.0), *module("layers.0", 1.0, NAN), *module("layers.1", NAN, NAN)]
    (found,) = Bench("nonfinite").feed(*values, grad("layers.0.w", NAN), loss=NAN)
    assert (found.site.name, found.site.slot) == ("layers.0", "output")


WEIGHT = value("forward", "parameter", "layers.2.w", "value", norm=1.0)  # all that the default plan sees of a forward


@pytest.mark.parametrize("seen", [[], [WEIGHT]], ids=["nothing", "weights"])
def test_of_a_forward_pass_that_was_not_recorded_nothing_is_claimed(seen):
    (found,) = Bench("nonfinite").feed(*seen, grad("layers.2.w", NAN))
    assert (
        "Neither the forward pass nor the loss was recorded. The batch of step 0 on one of the 2 ranks had it, or"
        in found.message
    )
    (found,) = Bench("nonfinite").feed(*seen, grad("layers.2.w", NAN), loss=1.0)
    assert "The loss was finite, the backward pass made it" in found.message
    (found,) = Bench("nonfinite").feed(*seen, grad("layers.2.w", NAN), loss=NAN)
    assert found.site.name == "loss" and "not recorded. The batch of step 0 on one of the 2 ranks had it, or" in found.message


def mixed_precision(folder: Path, level: str, skips: bool) -> trainprobe.Probe:
    """Train under fp16 autocast with a loss scale of 2 ** 20: the gradients of the first two steps overflow.

    skips: as GradScaler does; else the optimizer steps whatever the gradients are.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    x, y = torch.randn(64, 16), torch.randn(64, 4)
    with trainprobe.watch(model, optimizer, output=folder, level=level, monitor=True, console=False) as probe:
        for _ in range(4):
            with probe.step():
                with torch.autocast("cpu", torch.float16):
                    loss = torch.nn.functional.mse_loss(model(x), y)
                probe.note("loss", loss.detach())
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer) if skips else optimizer.step()
                scaler.update()
                optimizer.zero_grad()
    assert all(bool(p.isfinite().all()) for p in model.parameters()) == skips
    return probe


@pytest.mark.parametrize("level", ["off", "L0", "L1", "mix"])
def test_an_overflow_is_a_note_where_the_scaler_skips_the_step_and_an_error_where_the_optimizer_steps(level, tmp_path):
    found = {}
    for skips in (True, False):
        probe = mixed_precision(tmp_path / str(skips), level, skips)
        live = [(f.step, f.severity, f.site) for f in probe.findings if f.rule == "nonfinite"]
        again = [
            (f.step, f.severity, f.site) for f in judge_frames(read_frames(tmp_path / str(skips)), {"nonfinite": Options()})
        ]
        assert live == again
        found[skips] = [(step, severity) for step, severity, _ in live]
        told = next(f for f in probe.findings if f.rule == "nonfinite")
        assert ("The optimizer stepped all the same" in told.message) is not skips
        assert ("scaler.step(optimizer)" in (told.next or "")) is not skips
    assert found == {True: [(0, "info")], False: [(0, "error")]}


def test_what_is_not_finite_in_the_forward_pass_of_a_later_micro_batch_is_no_overflow():
    forward = value("forward", "op", "Tensor.log", "output", norm=NAN)
    passes = [*module("a", 1.0, 1.0), *module("a", 1.0, math.inf, "backward"), forward]
    (found,) = Bench("nonfinite").feed(*passes, *module("a", 1.0, math.inf, "backward", 1), loss=1.0, loss_scale=2.0**20)
    assert found.severity == "error"


def test_a_nan_that_a_modules_own_code_makes_is_placed_between_its_parts(tmp_path):
    """`module root, output` alone would send the reader through the whole model."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            """Take the logarithm of numbers of both signs between the second part and the third."""
            return self.third(self.second(self.first(x)).log())

    torch.manual_seed(0)
    model = Own()
    with trainprobe.watch(model, output=tmp_path, level="off", monitor=True, console=False) as probe, probe.step():
        model(torch.randn(8, 4))
    (found,) = [f for f in probe.findings if f.rule == "nonfinite"]
    assert "is in module root, output. Its inputs were finite" in found.message
    assert found.message.endswith("in its own code: third is the first submodule that gets it, behind second")
