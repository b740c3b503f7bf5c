"""What a model draws, keeps, copies and adapts, under the default audit: planted faults are found, healthy twins are not."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradient
from torch import nn
from torch.distributions import Categorical, Normal

import trainprobe
from tests.distributed.launch import launch
from trainprobe.engine.core.records import Place
from trainprobe.monitor.audit.capture.set_up import model_facts
from trainprobe.monitor.audit.evidence import Evidence, TensorsOfStep
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.facts.model import ModelFacts, TrainingState
from trainprobe.monitor.audit.facts.updates import BufferStates, UpdateCounts
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.peers import Peer
from trainprobe.monitor.audit.plan import validate
from trainprobe.monitor.audit.relations import replicated_buffers, untouched_between_steps


def found(tmp_path, model, loss_of, steps=2, between=None, optimizer=None):
    """Train under the default audit; return (rule, step) of what was found, and the messages."""
    optimizer = optimizer or torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=True, output=tmp_path / "out") as probe:
        for step in range(steps):
            with probe.step():
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            if between is not None:
                between(step)
    told = [f for f in probe.findings if f.severity != "info"]
    return [(f.rule, f.step) for f in told], [f.message for f in told]


# ---- samples ------------------------------------------------------------------------------------------------------------


class Sampling(nn.Module):
    """Draws from a normal distribution that it works out, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.mean, self.out = how, nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        """Return (what is made of the sample, the distribution, the sample)."""
        mean = self.mean(x)
        distribution = Categorical(logits=mean) if self.how == "discrete" else Normal(mean, 1.0)
        if self.how == "under no_grad":
            with torch.no_grad():
                sample = distribution.sample()
        else:
            sample = distribution.rsample() if self.how == "rsample" else distribution.sample()
        return self.out(nn.functional.one_hot(sample, 4).float() if self.how == "discrete" else sample), distribution, sample


@pytest.mark.parametrize("how", ["sample", "rsample", "scored", "discrete", "under no_grad", "outside"])
def test_a_sample_that_stops_the_gradient_is_found(tmp_path, how):
    torch.manual_seed(0)

    def loss_of(model):
        out, distribution, sample = model(torch.randn(6, 3))
        loss = out.square().mean() + distribution.logits.square().mean() if how == "discrete" else out.square().mean()
        if how == "scored":
            loss = loss - distribution.log_prob(sample).mean()
        if how == "outside":
            distribution.sample()
        return loss + (model.mean.weight.square().sum() + model.mean.bias.square().sum())

    rules, messages = found(tmp_path, Sampling("rsample" if how == "outside" else how), loss_of)
    assert rules == ([("sampled_without_gradient", 0)] if how == "sample" else [])
    assert not messages or ("Normal.sample()" in messages[0] and "mean." in messages[0])


# ---- rows ---------------------------------------------------------------------------------------------------------------


class Gates(nn.Module):
    """Rows that begin at 1 and are used differently."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 40))

    def forward(self, x):
        """Return [batch, 40]."""
        return x * self.weight[0] + x.sin() * self.weight[1]


@pytest.mark.parametrize("how", ["constant", "random", "zero", "frozen", "gates"])
def test_a_layer_that_was_filled_with_a_constant_is_found(tmp_path, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    for layer in (model[0], model[2]) if how in ("constant", "frozen") else ():
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    if how == "gates":
        model = nn.Sequential(model[0], Gates(), model[4])
    if how == "zero":
        nn.init.zeros_(model[4].weight)
    if how == "frozen":
        model[0].requires_grad_(False)
    rules, messages = found(tmp_path, model, lambda m: (m(torch.randn(6, 3)) - torch.eye(2)[0]).square().mean(), 48)
    assert rules == ([("equal_rows", 47)] if how == "constant" else [])
    assert not messages or "0.weight" in messages[0]


# ---- adapters -----------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A base layer and an adapter, as PEFT lays them out."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self):
        super().__init__()
        self.base_layer, self.merged, self.disable_adapters, self.active_adapters = nn.Linear(3, 3), False, False, ["default"]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False), "reference": nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False), "reference": nn.Linear(2, 3, bias=False)})
        self.requires_grad_(False)

    def forward(self, x):
        """Return [batch, 3]."""
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("how", ["frozen", "trained", "merged", "switched off"])
def test_adapters_that_are_all_frozen_are_found(tmp_path, how):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.LayerNorm(3))
    if how == "trained":
        model[0].lora_A["default"].requires_grad_(True)
        model[0].lora_B["default"].requires_grad_(True)
    model[0].merged, model[0].disable_adapters = how == "merged", how == "switched off"
    rules, messages = found(tmp_path, model, lambda m: (m(torch.randn(6, 3)) - 1).square().mean())
    assert rules == ([("adapters", 0)] if how == "frozen" else [])
    assert not messages or "0.lora_A.default.weight and 1 more" in messages[0]


# ---- copies -------------------------------------------------------------------------------------------------------------


class Normalised(nn.Sequential):
    """A small model with running statistics."""

    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("how", ["weights alone", "buffers too", "at rest", "whole state", "in training mode"])
def test_an_average_whose_statistics_stand_still_is_found(tmp_path, how):
    torch.manual_seed(0)
    model = Normalised()
    average = copy.deepcopy(model).train(how == "in training mode")

    @torch.no_grad()
    def between(step):
        if how == "whole state":
            average.load_state_dict(model.state_dict())
        elif how != "at rest":
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        if how == "buffers too":
            for mine, its in zip(average.buffers(), model.buffers(), strict=True):
                mine.copy_(its)
        if step % 5 == 4:
            model.eval()
            average(torch.randn(6, 3))
            model.train()

    rules, messages = found(tmp_path, model, lambda m: m(torch.randn(6, 3)).square().mean(), 25, between)
    assert rules == ([("stale_copies", 23)] if how == "weights alone" else [])
    assert not messages or "1.running_mean and 1 more" in messages[0]


# ---- buffers over ranks -------------------------------------------------------------------------------------------------


def on_two_ranks(name, apart, **more):
    """Return evidence of rank 0, where a buffer was equal on both ranks at first."""
    model = ModelFacts(**more)
    facts = Facts(TrainingState(model, model), UpdateCounts(1), BufferStates({name: 1}))
    peer = Peer(0, {"dp": 0}, {}, {}, (), {key_of(name, "begun"): (1, 0.0)}, {}, {})
    other = replace(peer, rank=1, axes={"dp": 1}, rows={key_of(name, "begun"): (2 if apart else 1, 0.0)})
    place = Place(0, 2, {"dp": (0, 2)})
    known = {f"begun {name}": frozenset({"dp"})}
    return Evidence(23, place, facts, TensorsOfStep(), validate(True), peers=(peer, other), replicated=known)


def test_a_codebook_that_each_rank_keeps_by_itself_is_found():
    (finding,) = replicated_buffers.check(on_two_ranks("quantizer.embed", True))
    assert "quantizer.embed differs in the dp group of ranks 0, 1" in finding.message and finding.severity == "warning"


@pytest.mark.parametrize(
    "healthy",
    [
        on_two_ranks("quantizer.embed", False),
        on_two_ranks("norm.running_mean", True),  # each rank keeps its own unless they are synchronised
        on_two_ranks("quantizer.embed", True, broadcasts=True),
        replace(on_two_ranks("quantizer.embed", True), replicated={}),  # it was of its rank from the start
    ],
)
def test_buffers_that_are_alike_or_may_differ_are_no_finding(healthy):
    assert replicated_buffers.check(healthy) == []


@pytest.mark.parametrize(("rank", "rules"), [(0, ["untouched_between_steps"]), (1, [])])
def test_running_statistics_that_a_wrapper_hands_over_before_a_forward_are_judged_where_they_come_from(rank, rules):
    name, counts = "n.running_mean", UpdateCounts(1)
    before = Facts(TrainingState(ordinal=0), counts, BufferStates({name: 0}, {name: 1}))
    now = Facts(TrainingState(ordinal=1), counts, BufferStates({name: 3}))
    place = Place(rank, 2, {"dp": (rank, 2)})
    earlier = Evidence(0, place, before, TensorsOfStep(), validate(True))
    found = untouched_between_steps.check(
        Evidence(1, place, now, TensorsOfStep(), validate(True), before=earlier, relation="untouched_between_steps")
    )
    assert [finding.rule for finding in found] == rules


# ---- what is gathered ---------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(features, how):
    """Return the features of all ranks (there is one)."""
    if how == "with its gradient":
        return torch.cat(with_gradient.all_gather(features))
    pieces = [torch.zeros_like(features)]
    dist.all_gather(pieces, features.detach() if how == "detached" else features)
    if how == "own put back":
        pieces[0] = features
    return torch.cat(pieces)


@pytest.mark.parametrize("how", ["as a list", "with its gradient", "own put back", "detached", "for a report"])
def test_features_that_are_gathered_without_their_gradient_are_found(tmp_path, one_rank, how):
    torch.manual_seed(0)
    model = nn.ModuleDict({"image": nn.Linear(3, 4), "text": nn.Linear(3, 4)})
    before = dist.ProcessGroup.allgather, torch.Tensor.__matmul__, nn.functional.linear

    def loss_of(model):
        image, text = model["image"](torch.randn(6, 3)), model["text"](torch.randn(6, 3))
        everybody = gathered(text, how)
        logits = image @ (text if how == "for a report" else everybody).T
        return nn.functional.cross_entropy(logits, torch.arange(6)) + (text.square().mean() + everybody.detach().mean())

    rules, messages = found(tmp_path, model, loss_of)
    assert rules == ([("gathered_features", 0)] if how == "as a list" else [])
    assert not messages or "depends on text." in messages[0]
    assert (dist.ProcessGroup.allgather, torch.Tensor.__matmul__, nn.functional.linear) == before


# ---- terms that are made of gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["penalty", "force", "with a graph", "adversarial", "weight of a loss", "for a report", "of parameters"]
)
def test_a_term_that_is_made_of_a_gradient_without_a_graph_is_found(tmp_path, how):
    torch.manual_seed(0)
    before = torch.autograd.grad, torch.Tensor.__add__, torch.Tensor.norm

    def loss_of(model):
        x = torch.randn(6, 3, requires_grad=True)
        out = model(x)
        loss = out.square().mean()
        by = next(model.parameters()) if how == "of parameters" else x
        (slope,) = torch.autograd.grad(out.sum(), by, create_graph=how == "with a graph", retain_graph=True)
        if how == "force":
            return loss + nn.functional.mse_loss(-slope, torch.ones_like(slope))
        if how == "adversarial":
            total = 0
            return total + loss + model(x + 0.1 * slope.sign()).square().mean()
        if how == "weight of a loss":
            return loss + slope.norm() * out.abs().mean()
        if how == "for a report":
            (loss.detach() + slope.norm()).item()
            return loss
        return loss + 10 * (slope.norm(dim=1) - 1).square().mean()

    rules, messages = found(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), loss_of)
    assert rules == ([("gradient_terms", 0)] if how in ("penalty", "force") else [])
    assert not messages or "create_graph=True" in messages[0]
    assert (torch.autograd.grad, torch.Tensor.__add__, torch.Tensor.norm) == before


def test_steps_that_are_not_audited_run_functions_of_torch_itself(tmp_path):
    watched = {"sample": [], "grad": []}

    def loss_of(model):
        watched["sample"].append(Normal.sample)
        watched["grad"].append(torch.autograd.grad)
        return model(torch.randn(6, 3)).square().mean()

    own = {"sample": Normal.sample, "grad": torch.autograd.grad}
    assert found(tmp_path, nn.Linear(3, 1), loss_of, 4)[0] == []
    for name, seen in watched.items():
        assert [function is own[name] for function in seen] == [False, False, True, True], name


# ---- a module that tells of its parameters in its own way ---------------------------------------------------------------


class Losses(nn.Module):
    """A loss that holds its networks, as torchrl's do: `named_parameters` takes fewer arguments and leaves targets out."""

    def __init__(self):
        super().__init__()
        self.critic, self.again, self.target = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(3, 4).requires_grad_(False)
        self.tied = nn.ModuleList([self.critic])

    def named_parameters(self, prefix="", recurse=True):
        """Leave the target's parameters out."""
        named = super().named_parameters(prefix=prefix, recurse=recurse)
        return (pair for pair in named if not pair[0].startswith("target"))

    def forward(self, x):
        """Return the error against the target."""
        return self.again((self.critic(x) - self.target(x)).square())


def test_a_module_with_named_parameters_of_its_own_is_audited(tmp_path):
    torch.manual_seed(0)
    model = Losses()
    assert found(tmp_path, model, lambda m: m(torch.randn(6, 3)).square().mean(), 4) == ([], [])
    facts = model_facts([model], [], {}, owners_known=False)
    known = {name: parameter.identity for parameter in facts.parameters for name in parameter.names}
    named = nn.Module.named_parameters(model, remove_duplicate=False)
    assert known == {name: id(parameter) for name, parameter in named}


# ---- modes --------------------------------------------------------------------------------------------------------------


def test_a_layer_of_a_sequence_that_rests_is_no_chunk_in_evaluation_mode(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[:2].requires_grad_(False)[1].eval()  # as one fine-tunes the last layer alone
    assert found(tmp_path, model, lambda m: m(torch.randn(6, 3)).square().mean(), 3) == ([], [])


def test_one_of_two_chunks_in_evaluation_mode_is_found(tmp_path):
    torch.manual_seed(0)
    chunks = [nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1)), nn.Sequential(nn.Linear(4, 1))]
    chunks[1].eval()
    optimizer = torch.optim.Adam([p for chunk in chunks for p in chunk.parameters()], lr=1e-2)
    rules, messages = found(tmp_path, chunks, lambda m: m[1](m[0](torch.randn(6, 3))).square().mean(), 3, optimizer=optimizer)
    assert rules == [("modes", 0)] and "chunk 1 of the model is in evaluation mode" in messages[0]


# ---- optimizers of other packages ---------------------------------------------------------------------------------------


class Estimated(torch.optim.SGD):
    """Steps by `d * lr`, as Prodigy does: `d` begins at 1e-6."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.param_groups[0]["d"] = 1e-9

    def step(self, closure=None):
        """Scale the rate for the length of the step."""
        (group,) = self.param_groups
        group["lr"] = group["d"]
        super().step(closure)
        group["lr"] = 1.0


class SOAP(torch.optim.Adam):
    """Prepares its preconditioner in the first step and moves nothing, as SOAP does."""

    begun = False

    def step(self, closure=None):
        """Step from the second one on."""
        if self.begun:
            super().step(closure)
        self.begun = True


@pytest.mark.parametrize("kind", [Estimated, SOAP])
def test_a_step_that_has_to_move_nothing_is_no_finding(tmp_path, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    assert found(tmp_path, model, lambda m: m(torch.randn(6, 3)).square().mean(), optimizer=kind(model.parameters())) == (
        [],
        [],
    )


def test_a_soap_that_never_moves_is_found(tmp_path):
    class NoSOAP(torch.optim.Adam):
        def step(self, closure=None):
            pass

    model = nn.Linear(3, 1)
    rules, _ = found(tmp_path, model, lambda m: m(torch.randn(6, 3)).square().mean(), optimizer=NoSOAP(model.parameters()))
    assert ("movement", 1) in rules


class TwoCritics(nn.Module):
    """Two networks whose parameters are stacked, as torchrl keeps them: the biases of their one output are a [2, 1]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 1, 3)), nn.Parameter(torch.full((2, 1), 0.1))

    def forward(self, x):
        """Return [2, batch, 1]."""
        return x @ self.weight.mT + self.bias[:, None]


def test_two_numbers_that_are_equal_are_no_equal_rows(tmp_path):
    torch.manual_seed(0)
    model = TwoCritics()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    audit = {"every": 1, "relations": {"equal_rows": 1}}
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=audit, output=tmp_path / "out") as probe:
        for _ in range(3):
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(6, 3)).mean().backward()
                optimizer.step()
    assert model.bias[0] == model.bias[1] and probe.findings == []


def test_gradients_that_powersgd_compresses_are_not_taken_for_a_wrong_reduction(tmp_path):
    said = launch(Path(__file__).with_name("train_powersgd.py"), 2, str(tmp_path / "out"))
    assert ["found []" in text for text in said] == [True, True], said


def test_ranks_with_uneven_inputs_are_not_made_to_wait_for_one_that_has_ended(tmp_path):
    script = Path(__file__).with_name("train_uneven.py")
    bare = launch(script, 2, str(tmp_path / "bare"))
    watched = launch(script, 2, str(tmp_path / "out"), "watched")
    for alone, beside in zip(bare, watched, strict=True):
        losses, found = beside.strip().splitlines()[-2:]
        assert losses == alone.strip().splitlines()[-2] and losses.startswith("losses ['0x")
        assert found.startswith("found [('info', \"ranks are not compared inside torch.distributed's Join")
        assert found.count("('") == 1, "nor that the rank which ends last hands over its weights"


def test_ranks_that_train_apart_by_local_sgd_are_not_compared(tmp_path):
    for text in launch(Path(__file__).with_name("train_local_sgd.py"), 2, str(tmp_path / "out")):
        found = next(line for line in text.splitlines() if line.startswith("found "))
        assert found.startswith("found [('info', 'ranks are not compared: under local SGD") and found.count("('") == 1
