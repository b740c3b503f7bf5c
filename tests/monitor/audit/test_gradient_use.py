"""What becomes of gradients, masters, schedules and data: faults in plain loops of one process are found where they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import trainprobe
from benchmarks.bugs import unseen, unseen_again
from tests.monitor.audit.trained import PLAN, findings

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("bug", "rule", "name"),
    [
        (unseen.SumOfMicroBatches, "reported_loss", "loss"),
        (unseen.ClearedInAccumulation, "cleared_gradients", "0.0.weight"),
        (unseen.SteppedTwice, "step_counters", "0.0.weight"),
        (unseen.NormalisedByEvaluation, "untouched_between_steps", "0.1.running_mean"),
        (unseen.WithoutGradient, "reached_parameters", "0.0.weight"),
        (unseen.Detached, "reached_parameters", "embedding.weight"),
        (unseen.OptimizerNotLoaded, "saved_and_loaded", "wte.weight"),
        (unseen.SchedulerNotLoaded, "resumed", "lr"),
        (unseen.WeightsNotMatched, "saved_and_loaded", "wte.weight"),
        (unseen.DataFromTheBeginning, "resumed", "batch"),
        (unseen.MasterNotCopied, "movement", "2.weight"),
        (unseen.SecondNotStepped, "movement", "1.0.weight"),
        (unseen.OwnedTwice, "step_counters", "0.0.weight"),
        (unseen.ClosureNotCleared, "cleared_gradients", "0.0.weight"),
        (unseen_again.GradientMasked, "reached_parameters", "blocks.1.linear1.weight"),
        (unseen_again.ScaleNotRenewed, "movement", "embedding.weight"),
    ],
)
def test_a_fault_is_found_at_its_step_and_named(tmp_path, bug, rule, name):
    first = findings(bug, tmp_path / "out")[0]
    late = 7 if bug is unseen_again.ScaleNotRenewed else 0  # eight steps without an update
    assert (first.rule, first.site.name, first.step) == (rule, name, bug.begins + late)


@pytest.mark.parametrize(
    "twin", [unseen.Vision, unseen.Recurrent, unseen.Averaged, unseen.Resumed, unseen.Masters, unseen.Pair, unseen.Closure]
)
def test_their_healthy_twins_raise_no_alarm(tmp_path, twin):
    assert [f.message for f in findings(twin, tmp_path / "out")] == []


def test_a_parameter_whose_output_the_loss_does_not_use_is_told_at_once_and_an_expert_that_did_not_run_is_not(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("used", "unused", "expert")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, plan=PLAN, output=tmp_path / "out") as probe, probe.step(0):
        x = torch.ones(2, 3)
        model["unused"](x)
        model["used"](x).sum().backward()
        optimizer.step()
    assert [(f.rule, f.severity, f.site.name) for f in probe.findings] == [("reached_parameters", "warning", "unused.weight")]
    assert "unused.weight and 1 more" in probe.findings[0].message


@pytest.mark.parametrize("removed", [range(0, 3), range(4, 6)])
def test_a_gradient_that_the_program_takes_away_is_told_where_it_was_used_before(tmp_path, removed):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, plan=PLAN, output=tmp_path / "out") as probe:
        for step in range(6):
            with probe.step(step):
                model(torch.ones(2, 3)).square().sum().backward()
                if step in removed:  # self-distillation freezes its last layer so in the first epoch
                    model[1].weight.grad = None
                optimizer.step()
                optimizer.zero_grad()
    told = [(f.severity, f.step, f.site.name) for f in probe.findings if f.rule == "reached_parameters"]
    assert told == ([] if 0 in removed else [("error", 4, "1.weight")])


def test_a_sampler_that_was_told_of_no_new_epoch_is_found_and_left_as_it_was(tmp_path):
    original = DistributedSampler.__iter__
    sampler = DistributedSampler(TensorDataset(torch.arange(8)), 1, 0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    with trainprobe.watch(model, optimizer, plan=PLAN, output=tmp_path / "out") as probe:
        for step, epoch in enumerate((0, 1, None)):
            if epoch is not None:
                sampler.set_epoch(epoch)
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.tensor([[float(i)] for i in sampler])).sum().backward()
                optimizer.step()
            told.append(len([f for f in probe.findings if "set_epoch" in (f.next or "")]))
    assert told == [0, 0, 1]
    assert DistributedSampler.__iter__ is original


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_that_the_program_adds_up_in_buffers_of_its_own_are_not_lost(tmp_path, keeps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with trainprobe.watch(model, optimizer, plan=PLAN, output=tmp_path / "out") as probe:
        for step in range(6):
            total = [torch.zeros_like(p) for p in model.parameters()]
            with probe.step(step):
                for _ in range(4):
                    optimizer.zero_grad()
                    (model(torch.randn(16, 8)).square().mean() / 4).backward()
                    for kept, p in zip(total, model.parameters(), strict=True):
                        kept.add_(p.grad)
                for kept, p in zip(total, model.parameters(), strict=True):
                    p.grad = kept if keeps else p.grad
                optimizer.step()
    assert {f.rule for f in probe.findings if f.severity == "error"} == (set() if keeps else {"cleared_gradients"})
