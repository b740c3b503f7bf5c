"""Faults and healthy trainings of further kinds: schedulers in sequence, a teacher, experts, a sharded optimizer."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from benchmarks.bugs import unseen_fourth as fourth
from benchmarks.bugs.loops import Averaged, Vision
from benchmarks.bugs.modern_loops import Diffusion, Distilled, Patches, Streamed
from benchmarks.bugs.token_loops import MainGradients, Policy, Routed, ScaledTwice, Translator
from tests.monitor.audit.trained import assert_found, assert_found_on_two_ranks, findings
from trainprobe.engine.core.records import Place
from trainprobe.monitor.audit.evidence import Evidence, TensorsOfStep
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.facts.calls import TrainingCalls
from trainprobe.monitor.audit.facts.gradients import Backwards, Clip, ClippedGradients, Reduction, Reductions, UsedGradients
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.peers import Peer
from trainprobe.monitor.audit.plan import AuditPlan
from trainprobe.monitor.audit.relations import reduced_gradients, reported_loss

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("bug", "rule", "name"),
    [
        (fourth.ScheduledFirst, "learning_rate", "lr"),
        (fourth.TrainForgotten, "modes", "root"),
        (fourth.NormsDecayed, "settings", "weight_decay"),
        (fourth.HookedAgain, "hooks", "patch.weight"),
        (fourth.ClippedBehindTheUpdate, "clipping", "grad_norm"),
        (fourth.ParametersUsedUp, "gradient_norm", "grad_norm"),
        (fourth.SeededEachStep, "random_streams", "random state"),
        (fourth.MeanOfMeans, "reported_loss", "loss"),
        (fourth.ExpertsInAList, "ownership", "blocks.0.moe.experts.0.0.weight"),
        (fourth.ScaleRaisedInside, "reported_loss", "loss"),
        (fourth.OverflowHidden, "finite_together", "0.0.weight"),
        (fourth.BalanceNotLoaded, "saved_and_loaded", "blocks.0.moe.balance"),
        (fourth.ForwardedTwice, "resumed", "lr"),
        (fourth.BetasExchanged, "settings", "betas"),
        (fourth.ScalerNotLoaded, "resumed", "loss_scale"),
    ],
)
def test_a_fault_is_found_at_its_step_and_named(tmp_path, bug, rule, name):
    assert_found(bug, rule, name, tmp_path)


@pytest.mark.parametrize(
    "twin", [Patches, Streamed, Diffusion, Distilled, Translator, Routed, ScaledTwice, MainGradients, Policy]
)
def test_the_healthy_twins_raise_no_alarm(tmp_path, twin):
    assert [f.message for f in findings(twin, tmp_path / "out")] == []


def test_an_average_in_the_model_that_no_longer_follows_is_found_and_the_frozen_weights_beside_it_are_not(tmp_path):
    first = findings(fourth.TeacherOfItself, tmp_path / "out")[0]
    assert (first.rule, first.site.name.partition(".")[0], first.step) == (
        "movement",
        "teacher",
        fourth.TeacherOfItself.begins + 1,
    )


def test_parameters_that_are_used_up_are_named_as_the_cause(tmp_path):
    """As in diffusers' train_text_to_image_lora.py, whose filter the optimizer has used up."""
    first = findings(fourth.ParametersUsedUp, tmp_path / "out")[0]
    assert "reported gradient norm 0 is" in first.message
    assert "taken of no gradient" in first.message
    assert "used up" in first.next


def test_state_that_leaves_the_rule_of_an_optimizer_that_nobody_knows_is_found(tmp_path):
    first = findings(fourth.MomentumOverwritten, tmp_path / "out")[0]
    assert (first.rule, first.step, first.site.slot) == (
        "moment_recurrence",
        fourth.MomentumOverwritten.begins,
        "momentum_buffer",
    )
    assert "is no longer 0.95 times itself and 1 times the gradient" in first.message


ON_TWO_RANKS = {
    "not handed over": ("replicas", "blocks.1.linear1.weight"),
    "clipped by owned": ("clipping", "clip coefficient"),
    "divided by ranks only": ("reduced_gradients", "0.0.weight"),
    "own tokens": ("reported_loss", "loss"),
    "not told partial": ("replicas", "blocks.0.ln.weight"),
}


def test_faults_of_two_ranks_are_found_at_their_step_and_their_twins_raise_no_alarm():
    assert_found_on_two_ranks(fourth.UNSEEN_FOURTH, ON_TWO_RANKS)


class Cycled(Vision):
    """A schedule that moves momentum and rate in each step, and a decay that another moves."""

    def make_scheduler(self):
        """One cycle."""
        return torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=40)

    def schedule(self, step):
        """Move the decay too."""
        super().schedule(step)
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 1.01


class Frozen(Vision):
    """Parameters are frozen one after the other, so that ever fewer have a momentum, and an infinite gradient passes by."""

    def before(self, step):
        """Freeze another one."""
        if 4 <= step < 8:
            next(p for p in self.model.parameters() if p.requires_grad).requires_grad_(False)

    def make_optimizer(self):
        """Own all."""
        return Momentum(self.model.parameters(), lr=1e-3)

    def clip(self, step):
        """Overflow once."""
        if step == 10:
            for p in self.model.parameters():
                p.grad = None if p.grad is None else p.grad * float("inf")


class Momentum(torch.optim.Optimizer):
    """Momentum written by hand; a step that is not finite is left out."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """Move along the mean."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.mul_(0.9).add_(p.grad)
            p.sub_(mean, alpha=self.param_groups[0]["lr"])


def test_state_of_fewer_parameters_and_infinities_are_no_fault_of_the_audit(tmp_path):
    assert {f.rule for f in findings(Frozen, tmp_path / "out")} <= {"trainable_set", "nonfinite", "finite_together"}


class Swung(Vision):
    """Momentum that swings from step to step."""

    def schedule(self, step):
        """Swing it."""
        super().schedule(step)
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.9 - 0.1 * (step % 2)


class Chained(Vision):
    """Two schedulers that are stepped by a third."""

    def make_scheduler(self):
        """Chain them."""
        parts = [
            torch.optim.lr_scheduler.ConstantLR(self.optimizer, 0.5, 4),
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9),
        ]
        return torch.optim.lr_scheduler.ChainedScheduler(parts)


class Measured(Averaged):
    """The norm is measured behind the update too, with the function that clips and a limit that nothing exceeds."""

    def schedule(self, step):
        """Measure it."""
        super().schedule(step)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))


class SeededBySteps(Averaged):
    """Each step has a seed of its own."""

    def before(self, step):
        """Seed."""
        torch.manual_seed(step)


class HookedTwiceOnPurpose(Averaged):
    """Two hooks made by the same lines over different objects."""

    def build(self):
        """Register them."""
        model = super().build()
        for factor in (0.5, 2.0):
            model.ln.weight.register_hook(lambda gradient, factor=factor: gradient * factor)
        model.ln.register_forward_hook(watching([]))
        model.ln.register_forward_hook(watching([]))
        return model


def watching(seen):
    """Return a hook that keeps what passes."""
    return lambda module, inputs, out: seen.append(out.detach()) if False else None


class WithOtherModels(Averaged):
    """A model keeps another one in a list, so that it is no part of it: a frozen teacher that is asked and never trained."""

    def build(self):
        """Keep it."""
        model = super().build()
        model.teachers = [torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)]
        return model


@pytest.mark.parametrize("style", [Cycled, Swung, Chained, Measured, SeededBySteps, HookedTwiceOnPurpose, WithOtherModels])
def test_healthy_loops_near_to_a_fault_raise_no_alarm(tmp_path, style):
    assert [f.message for f in findings(style, tmp_path / "out")] == []


@pytest.mark.parametrize(
    ("factor", "clips", "alarms"),
    [(0.5, 0, 0), (1.0, 0, 1), (0.25, 0, 1), (0.44, 0, 0), (0.44, 1, 1), (0.51, 1, 0)],
)
def test_another_divisor_of_all_gradients_is_told_and_the_factor_of_a_loop_that_clips_by_itself_is_not(factor, clips, alarms):
    names = ("a", "b", "c", "d")
    reductions = tuple(Reduction(name, 1.0, 2 * factor, 2 * factor) for name in names)
    clipped = ClippedGradients((Clip(frozenset(names), 1.0),) * clips)
    facts = Facts(Backwards(1), UpdateCounts(1), Reductions(reductions), clipped)
    told = {key_of(name, "arrived"): 1.0 for name in names}
    numbers = dict.fromkeys(("loss", "differentiated"), float("nan"))
    peers = tuple(Peer(rank, {"dp": rank}, numbers, {}, (), {}, told) for rank in range(2))
    place, over = Place(0, 2, {"dp": (0, 2)}), {name: frozenset({"dp"}) for name in names}
    memory = {"reduced_gradients": (0.5, 1, 3)}
    about = Evidence(9, place, facts, TensorsOfStep(), AuditPlan(), peers=peers, replicated=over, memory=memory)
    found = reduced_gradients.check(about)
    assert [f.site.name for f in found] == ["a"] * alarms


@pytest.mark.parametrize(("losses", "reported", "alarms"), [((3.0, 3.0), 3.0, 0), ((1.0, 3.0), 2.0, 0), ((1.0, 3.0), 3.0, 1)])
def test_a_mean_that_the_last_micro_batch_happens_to_equal_is_not_taken_for_it_alone(losses, reported, alarms):
    """On two ranks nobody knows whether two micro-batches or two ranks are averaged over."""
    place = Place(0, 2, {"dp": (0, 2)})
    facts = Facts(TrainingCalls((1, 2)), UsedGradients(differentiated=losses), UpdateCounts(1))
    evidence = Evidence(9, place, facts, TensorsOfStep(), AuditPlan(), scalars={"loss": reported})
    assert ["last of 2 micro-batches" in f.message for f in reported_loss.check(evidence)] == [True] * alarms


@pytest.mark.parametrize(("forwards", "alarms"), [(2, 1), (4, 1), (3, 0)])
def test_a_sum_of_micro_batches_is_found_where_each_has_several_forwards(forwards, alarms):
    """Policies compare a chosen answer with a rejected one: two forwards for one loss."""
    facts = Facts(TrainingCalls(tuple(range(forwards))), UsedGradients(differentiated=(1.0, 3.0)), UpdateCounts(1))
    evidence = Evidence(9, Place(0, 1, {}), facts, TensorsOfStep(), AuditPlan(), scalars={"loss": 2.0})
    assert ["summed over the micro-batches" in f.message for f in reported_loss.check(evidence)] == [True] * alarms


def train_with(optimizers, chosen, folder):
    """Train six steps, of which `chosen` names the optimizer of each: a function that makes it, or one made before."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    made = [make(model.parameters()) for make in optimizers]
    with trainprobe.watch(model, output=folder, level="off", sinks=[], audit={"every": 1}, console=False) as probe:
        for which in chosen:
            optimizer = which(model.parameters()) if callable(which) else made[which]
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    return [(f.rule, f.step, f.message) for f in probe.findings]


def adam(parameters):
    """Return the optimizer of these tests."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_optimizers_that_take_turns_over_the_same_parameters_keep_states_of_their_own(tmp_path):
    """A mistake that does so, the generator's optimizer over the discriminator, is told by its gradients alone."""
    assert train_with([adam, adam], (0, 1, 0, 1, 0, 1), tmp_path) == []


def test_an_optimizer_that_is_made_again_has_lost_its_state(tmp_path):
    found = train_with([adam], (0, 0, 0, adam, adam, adam), tmp_path)
    assert ("untouched_between_steps", 3) in [(rule, step) for rule, step, _ in found]
    assert found[0][2].endswith("is gone since step 2: another optimizer makes this update")
