"""Writes to weights between steps that are not audited, and programs that write to them and are right."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

import trainprobe
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Place
from trainprobe.monitor.audit.evidence import Evidence, TensorsOfStep
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.observers.weight_samples import WeightSamples
from trainprobe.monitor.audit.plan import AuditPlan
from trainprobe.monitor.audit.relations.written_between_steps import RestingWeights, Write, check

WRITTEN = 33  # after the update of this step; the audit looks at steps 23, 24, 46 and 47

FAULTS = {
    "in place": lambda model: model[2].weight.mul_(1.01),
    "past autograd": lambda model: model[2].weight.data.add_(1e-3),
    "other memory": lambda model: setattr(model[2].weight, "data", model[2].weight.data * 2),
}
HEALTHY = (
    "nothing", "loads", "takes weights away and back", "clips weights at each step", "moves them to other memory", "two",
    "an ascent step that is taken back", "an outer optimizer every 15 steps",
    "merges adapters every 15 steps",
)  # fmt: skip


def train(how: str, folder, steps: int = 60, device: str = "cpu") -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(device)
    start = copy.deepcopy(model.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    optimizers += [torch.optim.SGD(model[2].parameters(), lr=1e-3)] if how == "two" else []
    base = torch.zeros(3, 6, device=device)
    outer = [p.detach().clone().requires_grad_() for p in model.parameters()]  # DiLoCo
    above = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    plan = {"monitor": False, "audit": {"relations": {"followers": False}}, "output": folder / "out", "console": False}
    with trainprobe.watch(model, optimizers, **plan) as probe:
        for step in range(steps):
            with probe.step():
                x = torch.randn(32, 6, device=device)
                loss = (model(x) - x[:, :3]).square().mean()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                if how in FAULTS and step == WRITTEN:
                    FAULTS[how](model)
                elif how == "an outer optimizer every 15 steps" and step % 15 == 14:
                    for p, own in zip(outer, model.parameters(), strict=True):
                        p.grad = p - own
                    above.step()
                    for p, own in zip(outer, model.parameters(), strict=True):
                        own.copy_(p)
                elif how == "merges adapters every 15 steps" and step % 15 == 14:  # ReLoRA: into a weight that is frozen
                    base.add_(model[2].weight @ model[0].weight)
                    nn.init.kaiming_uniform_(model[0].weight)
                    model[2].weight.zero_()
                elif how == "loads" and step == WRITTEN:
                    model.load_state_dict(start)
                elif how == "takes weights away and back":
                    now = copy.deepcopy(model.state_dict())
                    model[2].weight.zero_()
                    model[2].weight.copy_(now["2.weight"])
                elif how == "clips weights at each step":
                    model[2].weight.clamp_(-0.05, 0.05)
                elif how == "an ascent step that is taken back" and step > WRITTEN:  # w + e - e is w but for rounding
                    model[2].weight.add_(0.05 / (step + 1)).sub_(0.05 / (step + 1))
                elif how == "moves them to other memory":
                    model[2].weight.data = model[2].weight.data.clone()
    return [f for f in probe.findings if f.rule == "written_between_steps"]


@pytest.mark.parametrize("how", FAULTS)
def test_a_write_between_steps_that_are_not_audited_is_found_at_its_step(how, tmp_path):
    (found,) = train(how, tmp_path)
    assert (found.severity, found.step, found.names) == ("warning", WRITTEN + 1, ("2.weight",))
    assert f"changed between the updates of steps {WRITTEN} and {WRITTEN + 1}" in found.message


def test_an_average_over_ranks_is_no_fault_and_is_one_in_a_process_alone():
    for ranks, copies, severity in ((1, False, "warning"), (2, False, "info"), (2, True, "warning")):
        write = Write(14, 15, ("a", "b", "c"), 4, copies=copies)
        seen = Evidence(23, Place(0, ranks), Facts(RestingWeights((write,))), TensorsOfStep(), AuditPlan())
        assert [f.severity for f in check(seen)] == [severity]


def test_ranks_under_ddp_are_copies_and_those_of_local_sgd_are_not():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        samples = WeightSamples(Guard(), SimpleNamespace(models=[model], optimizers=[], plain=True))
        assert samples._are_copies()
        model.register_comm_hook(PostLocalSGDState(None, None, 3), post_localSGD_hook)
        assert not samples._are_copies()
        assert not WeightSamples(Guard(), SimpleNamespace(models=[model.module], optimizers=[], plain=True))._are_copies()
    finally:
        torch.distributed.destroy_process_group()


def test_a_write_after_the_last_audited_step_is_found_too(tmp_path):
    (found,) = train("in place", tmp_path, steps=40)
    assert found.step == WRITTEN + 1


@pytest.mark.parametrize("how", HEALTHY)
def test_programs_that_write_to_weights_and_are_right_get_no_word(how, tmp_path):
    assert train(how, tmp_path) == []


def test_no_parameter_is_held_when_the_run_has_ended(tmp_path):
    train("nothing", tmp_path, steps=3)
    assert not any(one._left for one in gc.get_objects() if type(one) is WeightSamples)


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight.add_(0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_in_shared_memory_may_be_written_by_other_processes(tmp_path, shared):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    model = model.share_memory() if shared else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", audit={"every": 1}, monitor=False) as probe:
        for _ in range(3):
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
            if shared:
                other = torch.multiprocessing.get_context("fork").Process(target=_write, args=(model,))
                other.start()
                other.join()
                assert other.exitcode == 0
            else:
                _write(model)
    rules = [f.rule for f in probe.findings]
    assert rules == (["audit"] if shared else ["untouched_between_steps"])
    assert ("shared memory" in probe.findings[0].message) is shared
