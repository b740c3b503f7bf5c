"""Faults in loops of further styles: float16, a compiled model, adapters, masters, fully_shard, split sequences."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from benchmarks.bugs import unseen
from benchmarks.bugs import unseen_third as third
from benchmarks.bugs.loops import Averaged, Loop, Vision
from benchmarks.bugs.precise_loops import Adapters, Padded, Sixteen
from benchmarks.bugs.unseen import Masters
from tests.monitor.audit.trained import PLAN, assert_found, assert_found_on_two_ranks, findings
from trainprobe.engine.core.sources import PlainSource

torch.set_num_threads(1)

ON_TWO_RANKS = {
    "reduced after the first": ("cleared_gradients", "wte.weight"),
    "hook without division": ("reduced_gradients", "0.0.weight"),
    "random state of rank zero": ("random_streams", "random state"),
    "own loss reported": ("shared_scalars", "loss"),
    "scale apart": ("shared_scale", "loss_scale"),
    "mean of halves": ("reported_loss", "loss"),
}


@pytest.mark.parametrize(
    ("bug", "rule", "name"),
    [
        (third.AuxiliaryNotScaled, "reported_loss", "loss"),
        (third.ScaledNormReported, "gradient_norm", "grad_norm"),
        (third.TokensOfOneMicroBatch, "token_count", "tokens"),
        (third.CopyCompiled, "ownership", "wte.weight"),
        (third.DecayedTwice, "untouched_between_steps", "blocks.0.up.down"),
        (third.UnmergedByHalf, "untouched_between_steps", "blocks.0.up.base.weight"),
        (third.ReentrantCheckpoint, "reached_parameters", "blocks.0.up.down"),
        (third.CountersShared, "step_counters", "blocks.0.ln.weight"),
        (third.MastersFromModel, "untouched_between_steps", "0.weight"),
        (third.StateRounded, "untouched_between_steps", "0.weight"),
        (third.NormAfterClipping, "gradient_norm", "grad_norm"),
        (third.LossOfLastMicroBatch, "reported_loss", "loss"),
    ],
)
def test_a_fault_is_found_at_its_step_and_named(tmp_path, bug, rule, name):
    assert_found(bug, rule, name, tmp_path)


@pytest.mark.parametrize("twin", [Sixteen, Padded, Adapters, third.Layerwise, third.ByStages])
def test_their_healthy_twins_raise_no_alarm(tmp_path, twin):
    assert [f.message for f in findings(twin, tmp_path / "out")] == []


def test_faults_of_two_ranks_are_found_at_their_step_and_their_twins_raise_no_alarm():
    assert_found_on_two_ranks(third.UNSEEN_THIRD, ON_TWO_RANKS)


class NeverStepped(unseen.SecondNotStepped):
    """The second optimizer is not stepped from the start."""

    begins = 0


class NeverScaled(third.AuxiliaryNotScaled):
    """The second loss is not scaled from the start."""

    begins = 0


class LateSecond(unseen.Pair):
    """The second optimizer is stepped at each fifth step."""

    def update(self, step):
        """Step."""
        for optimizer in self.optimizer[: 2 if step % 5 == 4 else 1]:
            optimizer.step()


@pytest.mark.parametrize(
    ("bug", "rule", "name", "step"),
    [(NeverStepped, "movement", "1.0.weight", 7), (NeverScaled, "reported_loss", "loss", 0)],
)
def test_a_fault_that_was_there_from_the_start_is_found_without_a_healthy_step_before_it(tmp_path, bug, rule, name, step):
    first = findings(bug, tmp_path / "out")[0]
    assert (first.rule, first.site.name, first.step) == (rule, name, step)


def test_an_optimizer_that_steps_now_and_then_is_not_taken_for_one_that_never_does(tmp_path):
    assert [f.message for f in findings(LateSecond, tmp_path / "out")] == []


class Declared(third.AveragedOverPadding):
    """The padding is counted, and the loss that is meant is declared."""

    def step(self, step):
        """Declare it."""
        state = self.data.get_state()
        drawn = [self.ragged() for _ in range(self.micro)]
        self.data.set_state(state)
        self.probe.declare_loss(lambda model: self.meant(model, drawn))
        super().step(step)

    def meant(self, model, drawn):
        """Return the mean over the real tokens."""
        totals = [torch.nn.functional.cross_entropy(model(x).transpose(1, 2), y, reduction="sum") for x, y in drawn]
        return sum(totals) / sum(int((y >= 0).sum()) for _, y in drawn)


def test_a_loss_that_is_divided_by_the_padding_too_is_found_where_the_loss_is_declared(tmp_path):
    first = findings(Declared, tmp_path / "out")[0]
    assert (first.rule, first.step) == ("declared_loss", Declared.begins)
    assert first.measured < 0.9


class Smoothed(Vision):
    """Reports a running mean of the losses since the last report, every fourth step anew."""

    def report(self, step, loss, norm):
        """Average."""
        self.seen = [] if step % 4 == 0 else self.seen
        self.seen.append(float(loss))
        super().report(step, torch.tensor(sum(self.seen) / len(self.seen)), norm)


class FirstOfTwo(Sixteen):
    """Reports its main loss alone, and adds the other one from the fourth step on."""

    def loss(self, step, out, y):
        """Add late."""
        whole = super().loss(step, out, y)
        return whole if step > 3 else self.losses[0] + 0.0 * self.losses[1]

    def report(self, step, loss, norm):
        """Report the first."""
        super().report(step, self.losses[0].detach(), norm)


class Rounded(Vision):
    """Three micro-batches whose losses are bfloat16: their thirds round."""

    micro = 3

    def loss(self, step, out, y):
        """Round."""
        return super().loss(step, out, y).bfloat16()


@pytest.mark.parametrize("kind", [Smoothed, Rounded])
def test_a_report_that_was_never_the_loss_itself_is_not_judged(tmp_path, kind):
    assert [f.message for f in findings(kind, tmp_path / "out")] == []


def test_a_part_of_the_loss_that_comes_in_later_and_is_not_reported_is_a_warning(tmp_path):
    found = findings(FirstOfTwo, tmp_path / "out")
    assert [(f.rule, f.severity, f.step) for f in found] == [("reported_loss", "warning", 4)]


class ClippedByHand(Averaged):
    """Clips by its own code and reports the norm before that."""

    def clip(self, step):
        """Do as torch does."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        for p in self.model.parameters():
            p.grad.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        return norm


class ClippedAboveAll(Averaged):
    """The threshold is never reached: the norm before clipping is that after it."""

    def clip(self, step):
        """Measure."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e3)


@pytest.mark.parametrize("kind", [ClippedByHand, ClippedAboveAll])
def test_a_norm_before_clipping_is_in_order_however_it_is_clipped(tmp_path, kind: type[Loop]):
    assert [f.message for f in findings(kind, tmp_path / "out")] == []


def test_an_optimizer_that_rests_at_its_tolerance_is_in_order(tmp_path):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(8, 3)
    target = torch.randn(8, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe", tolerance_grad=1e-4)
    rested = 0
    with trainprobe.watch(model, optimizer, plan=PLAN, output=tmp_path / "out") as probe:
        for _ in range(6):
            before = model.weight.detach().clone()
            with probe.step():

                def closure():
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(model(x), target)
                    loss.backward()
                    return loss

                probe.note("loss", optimizer.step(closure).detach())
            rested += torch.equal(before, model.weight) and bool(model.weight.grad.abs().max() > 0)
    assert rested >= 3
    assert [f.message for f in probe.findings if f.severity != "info"] == []


def test_an_optimizer_that_leaves_a_weight_whose_gradient_has_turned_is_in_order(tmp_path):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.3)
    rested = 0
    with trainprobe.watch(model, optimizer, plan=PLAN, output=tmp_path / "out") as probe:
        for _ in range(12):
            before = model.weight.detach().clone()
            with probe.step():
                loss = (model(torch.ones(4, 1)) - 0.2).square().mean()
                optimizer.zero_grad()
                loss.backward()
                turned = model.weight.grad.clone()
                optimizer.step()
                probe.note("loss", loss.detach())
            rested += torch.equal(before, model.weight) and bool(turned.abs().max() > 0)
    assert rested >= 2
    assert [f.message for f in probe.findings if f.severity != "info"] == []


def test_master_weights_are_told_under_their_parameters_names_and_other_strays_are_not():
    run = Masters(0, 1, lambda *_: None)
    names = {id(p): name for name, p in run.model.named_parameters()}
    run.run()
    source = PlainSource(names, list(run.model.parameters()), [run.optimizer])
    parts = {(part.name, part.slot): part.tensor for part in source.parts("before_step")}
    assert parts["2.weight", "main_value"] is run.masters[2]
    assert parts["2.weight", "exp_avg"] is run.optimizer.state[run.masters[2]]["exp_avg"]
    flat = torch.optim.SGD([torch.nn.Parameter(torch.zeros(7))], lr=0.1)
    assert "main_value" not in {
        part.slot for part in PlainSource(names, list(run.model.parameters()), [flat]).parts("before_step")
    }
