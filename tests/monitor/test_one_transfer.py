"""A monitored step waits for the device once: one transfer of all numbers, and no tensor is read one by one.

The rows are reduced by torch's own operations, as on an accelerator; what brings numbers to Python is counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from small_training import GPT, batch
from torch.utils._python_dispatch import TorchDispatchMode

import trainprobe

torch.set_num_threads(1)
KINDS = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
FEATURES = {"attention": True, "weights": True, "formats": True, "dead_units": True}


class Reads(TorchDispatchMode):
    """Counts operations that hand a number to Python, which on a device wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def train(monkeypatch, folder=None, steps=4, **monitor):
    """Train a few steps; return how often a step brought rows to the host, and what was read one by one."""
    torch.manual_seed(0)
    model = GPT(width=16, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    generator, reads = torch.Generator().manual_seed(0), Reads()
    transfers: Counter[int] = Counter()
    now = [-1]
    original = torch.Tensor.cpu

    def counted(self, *args, **kwargs):
        transfers[now[0]] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    plan = {"output": folder, "level": "off", "native": False, "sinks": ["memory"], "on_error": "raise", "monitor": monitor}
    with trainprobe.watch(model, optimizer, plan) if folder else contextlib.nullcontext() as probe, reads:
        for step in range(steps):
            now[0] = step
            with probe.step(step) if probe else contextlib.nullcontext():
                optimizer.zero_grad(set_to_none=True)
                tokens = batch(generator)
                loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if probe:
                    probe.note("loss", loss.detach())
    monkeypatch.setattr(torch.Tensor, "cpu", original)
    return transfers, reads.seen


def test_one_transfer_a_collected_step(tmp_path, monkeypatch):
    _, bare = train(monkeypatch)
    transfers, reads = train(monkeypatch, tmp_path, **KINDS, update=True)
    assert transfers == dict.fromkeys(range(4), 1)
    assert reads == bare


@pytest.mark.parametrize(("more", "transfers_each"), [({"features": FEATURES}, 2), ({"batches": True}, 2)])
def test_features_and_fingerprints_of_batches_add_one_each_and_read_nothing_by_itself(
    tmp_path, monkeypatch, more, transfers_each
):
    _, bare = train(monkeypatch)
    transfers, reads = train(monkeypatch, tmp_path, **KINDS, **more)
    assert transfers == dict.fromkeys(range(4), transfers_each)
    assert reads == bare


def test_a_step_that_is_not_collected_brings_nothing(tmp_path, monkeypatch):
    transfers, _ = train(monkeypatch, tmp_path, **KINDS, step="every 2")
    assert transfers == {0: 1, 2: 1}
