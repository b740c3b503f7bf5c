"""A monitored step waits for the device once: one transfer of all numbers, and no tensor is read one by one.

Rows and features are worked out by torch's own operations, as on an accelerator; what brings numbers to Python is counted.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter

import pytest
import torch
from small_training import GPT, batch
from torch.utils._python_dispatch import TorchDispatchMode

import trainprobe
from trainprobe.engine.capture.features import number_formats
from trainprobe.engine.capture.features.loss_rows import SLOTS as SLOTS_OF_LOSS_ROWS

torch.set_num_threads(1)
NONE = {"activations": False, "parameters": False, "gradients": False}
KINDS = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
FEATURES = {
    "attention": True,
    "weights": True,
    "routers": True,
    "formats": True,
    "formats under amax": {"formats": ["fp4_e2m1", "fp8_e4m3", "fp16"], "scale": "amax"},
    "dead_units": {"names": "**"},
    "loss_rows": True,
}
SLOTS = {
    "attention": {"attention_entropy", "attention_logit", "attention_peak"},
    "weights": {"spectral_norm", "stable_rank"},
    "routers": {"router_load", "router_entropy", "router_similarity"},
    "formats": {f"{lost}_{form}" for lost in ("underflow", "overflow") for form in ("fp8_e4m3", "fp8_e5m2")} | {"exponents"},
    "dead_units": {"dead_units"},
    "loss_rows": set(SLOTS_OF_LOSS_ROWS),
}
EVERYTHING = {**KINDS, "update": True, "batches": True, "collectives": True}
AUDIT = {"level": "off", "audit": {"every": 1}}
DUMP = {"level": "L0", "histogram": "exponent", "quantiles": [0.1, 0.9]}


ATEN = torch.ops.aten
WAITING = {
    *(ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.is_nonzero.default),
    *(ATEN.nonzero.default, ATEN.masked_select.default, ATEN._unique2.default),
}


class Reads(TorchDispatchMode):
    """Counts operations that hand a number to Python, or a size that depends on numbers, which on a device wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is ATEN.index.Tensor and any(at is not None and at.dtype in (torch.bool, torch.uint8) for at in args[1])
        if func in WAITING or by_mask:
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Routed(torch.nn.Module):
    """A small GPT whose output is scaled by the first of four experts' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(width=16, layers=2)
        self.table = torch.nn.Embedding(256, 16)
        self.gate = torch.nn.Linear(16, 4, bias=False)
        self.top_k = 2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens) * self.gate(self.table(tokens)).softmax(-1)[..., :1]


def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(monkeypatch, folder=None, steps=2, plan=None, declared=False, **monitor):
    """Train a few steps; return how often a step brought rows to the host, what was read one by one, and the steps."""
    gc.collect()  # models of earlier tests are copies of this one, which the audit would look at
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    generator, reads, collected_steps = torch.Generator().manual_seed(0), Reads(), []
    transfers: Counter[int] = Counter()
    now = [-1]
    original = torch.Tensor.cpu

    def counted(self, *args, **kwargs):
        transfers[now[0]] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    monkeypatch.setattr(number_formats, "on_host", lambda device: False)
    options = {"output": folder, "level": "off", "native": False, "sinks": ["memory"], "on_error": "raise", "monitor": monitor}
    options |= {"console": False}  # the line at the start times what a step costs
    watched = trainprobe.watch(model, optimizer, {**options, **(plan or {})}) if folder else contextlib.nullcontext()
    with watched as probe, reads:
        for step in range(steps):
            now[0] = step
            tokens = batch(generator)
            if probe and declared:
                probe.declare_loss(lambda stand_in, tokens=tokens: loss_of(stand_in, tokens))
            if probe:
                probe.begin_step(step)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if probe:
                probe.note("loss", loss.detach())
                collected_steps.append(probe.end_step())
    monkeypatch.setattr(torch.Tensor, "cpu", original)
    return transfers, reads.seen, collected_steps


@pytest.fixture(scope="module")
def bare():
    """What the training itself reads one by one."""
    with pytest.MonkeyPatch.context() as patch:
        return train(patch)[1]


def one_feature(name):
    return {"features": {name.split()[0]: FEATURES[name]}}


def all_features():
    return {"features": {name: settings for name, settings in FEATURES.items() if " " not in name}}


def slots_of(step_data):
    return {feature.slot.split(".")[0] for feature in step_data.features}


def test_one_transfer_a_collected_step(tmp_path, monkeypatch, bare):
    transfers, reads, _ = train(monkeypatch, tmp_path, **KINDS, update=True)
    assert transfers == dict.fromkeys(range(2), 1)
    assert reads == bare


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("beside", [NONE, EVERYTHING], ids=["alone", "beside all else"])
def test_a_feature_adds_none_and_reads_nothing_by_itself(tmp_path, monkeypatch, bare, name, beside):
    transfers, reads, collected_steps = train(monkeypatch, tmp_path, **beside, **one_feature(name))
    assert transfers == dict.fromkeys(range(2), 1)
    assert reads == bare
    if name in SLOTS:
        assert all(slots_of(step_data) == SLOTS[name] for step_data in collected_steps)


def test_fingerprints_of_batches_and_tokens_alone_are_one_transfer(tmp_path, monkeypatch, bare):
    transfers, reads, collected_steps = train(monkeypatch, tmp_path, **NONE, batches=True)
    assert transfers == dict.fromkeys(range(2), 1)
    assert reads == bare
    assert len({step_data.batches[0] for step_data in collected_steps}) == 2
    assert all(step_data.scalars["tokens"] > 0 for step_data in collected_steps)


@pytest.mark.parametrize("plan", [{}, DUMP, {"black_box": True}], ids=["monitor", "beside a dump", "black box"])
def test_all_features_batches_and_tokens_together_are_one_transfer(tmp_path, monkeypatch, bare, plan):
    transfers, reads, collected_steps = train(monkeypatch, tmp_path, plan=plan, **EVERYTHING, **all_features())
    assert transfers == dict.fromkeys(range(2), 1)
    assert reads == bare
    assert all(slots_of(step_data) == set().union(*SLOTS.values()) for step_data in collected_steps)
    assert all(len(step_data.batches) == 1 and step_data.scalars["tokens"] > 0 for step_data in collected_steps)


def test_an_audited_step_with_a_declared_loss_is_one_transfer(tmp_path, monkeypatch):
    transfers, _, collected_steps = train(monkeypatch, tmp_path, plan=AUDIT, declared=True, **EVERYTHING, **all_features())
    assert transfers == dict.fromkeys(range(2), 1)
    assert all(step_data.features and step_data.batches for step_data in collected_steps)


def test_a_step_that_is_not_collected_brings_nothing(tmp_path, monkeypatch):
    transfers, _, _ = train(monkeypatch, tmp_path, 4, **KINDS, **all_features(), batches=True, step="every 2")
    assert transfers == {0: 1, 2: 1}
