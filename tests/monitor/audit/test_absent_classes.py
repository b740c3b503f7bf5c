"""A class that is never a target and keeps its probability is found; classes that are rare, ignored or learned away are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import trainprobe
from trainprobe.engine.core.records import Place
from trainprobe.monitor.audit.capture.class_shares import class_shares
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls
from trainprobe.monitor.audit.messages import decode, encode
from trainprobe.monitor.audit.peers import Peer
from trainprobe.monitor.audit.plan import AuditPlan
from trainprobe.monitor.audit.relations import absent_classes, relation_names

CLASSES = 6


def found(tmp_path, loss_of, outputs=CLASSES + 1, *, steps=90, rate=0.5):
    """Train on `CLASSES` clusters, under this relation at every step; loss_of(logits, kinds). Return what was found."""
    torch.manual_seed(2)
    data = torch.Generator().manual_seed(2)
    centres = torch.randn(CLASSES, 8, generator=data)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, outputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    plan = {"every": 1, "relations": dict.fromkeys(relation_names(), 0) | {"absent_classes": 1}}
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=plan, output=tmp_path, console=False) as probe:
        for _ in range(steps):
            with probe.step():
                kinds = torch.randint(0, CLASSES, (64,), generator=data)
                optimizer.zero_grad()
                loss_of(model(centres[kinds] + torch.randn(64, 8, generator=data)), kinds).backward()
                optimizer.step()
    return [finding for finding in probe.findings if finding.severity != "info"]


BOUNDED = {
    "labels that count from 1": lambda z, k: functional.cross_entropy(z.tanh(), k + 1),
    "the same as log-probabilities": lambda z, k: functional.nll_loss(z.sigmoid().mul(2).log_softmax(1), k + 1),
    "weights of classes": lambda z, k: functional.cross_entropy(z.tanh(), k + 1, weight=torch.linspace(0.5, 1.5, CLASSES + 1)),
    "two micro-batches": lambda z, k: (
        sum(functional.cross_entropy(a.tanh(), b + 1) for a, b in zip(z.chunk(2), k.chunk(2), strict=True)) / 2
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_a_class_that_is_never_a_target_and_cannot_be_ruled_out_is_found(tmp_path, name):
    (finding,) = found(tmp_path, BOUNDED[name])
    assert (finding.rule, finding.severity, finding.names) == ("absent_classes", "warning", ("class 0",))
    assert "class 0 was never a target" in finding.message
    assert finding.next is not None
    assert "labels count from 0" in finding.next


def masked(z, k):
    """A third of the targets is ignored, and so is the class of that index."""
    return functional.cross_entropy(z, torch.where(torch.arange(64) % 3 == 0, 0, k + 1), ignore_index=0)


HEALTHY = {
    "bounded, every class a target": (lambda z, k: functional.cross_entropy(z[:, :CLASSES].tanh(), k), CLASSES),
    "a class that the data lack": (lambda z, k: functional.cross_entropy(z, k), CLASSES + 1),
    "labels smoothed": (lambda z, k: functional.cross_entropy(z, k, label_smoothing=0.3), CLASSES + 1),
    "an index that is ignored": (masked, CLASSES + 1),
    "the positive first, then negatives": (lambda z, k: functional.cross_entropy(z.tanh(), torch.zeros_like(k)), CLASSES),
    "a vocabulary of which little is seen": (lambda z, k: functional.cross_entropy(z.tanh(), k * 3), 64),
    "teacher beside it": (
        lambda z, k: (
            functional.cross_entropy(z.tanh(), k)
            + functional.kl_div(z.log_softmax(1), torch.full_like(z, 1 / 7), reduction="batchmean")
        ),
        CLASSES + 1,
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_losses_over_classes_are_no_finding(tmp_path, name):
    assert found(tmp_path, *HEALTHY[name]) == []


def test_the_beginning_of_a_training_is_no_finding(tmp_path):
    assert found(tmp_path, BOUNDED["labels that count from 1"], rate=1e-4) == []


@pytest.mark.parametrize("shape", [(40, 5), (2000, 5), (3, 5, 4, 6), (2, 5, 30, 9)])
def test_shares_are_those_of_the_places_that_are_looked_at(shape):
    data = torch.Generator().manual_seed(1)
    x, y = torch.randn(*shape, generator=data), torch.randint(0, 5, (shape[0], *shape[2:]), generator=data)
    y[0] = -100
    every = [slice(None, None, -(-n // (1024 if len(shape) == 2 else 8))) for n in y.shape]
    logits, target = x.movedim(1, -1)[tuple(every)].reshape(-1, 5).double(), y[tuple(every)].flatten()
    valid = target != -100
    found = class_shares(x, y, -100, logarithms=False)
    assert found is not None
    assert found[:5].tolist() == [int((target == c).sum()) for c in range(5)]
    torch.testing.assert_close(found[5:10].double(), logits.softmax(1)[valid].sum(0), rtol=1e-5, atol=1e-5)
    expected = functional.cross_entropy(logits[valid], target[valid], reduction="sum")
    torch.testing.assert_close(found[10].double(), expected, rtol=1e-5, atol=1e-5)
    again = class_shares(x.log_softmax(1), y, -100, logarithms=True)
    torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-5)


def test_classes_without_any_probability_and_other_shapes_are_understood():
    ruled_out = torch.tensor([[0.0, 1.0, -torch.inf]])
    shares = class_shares(ruled_out, torch.tensor([1]), -100, logarithms=False)
    assert shares is not None
    assert torch.isfinite(shares).all()
    assert class_shares(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), -100, logarithms=False) is None
    assert class_shares(torch.zeros(4, 1001), torch.zeros(4, dtype=torch.long), -100, logarithms=False) is None


def test_a_class_that_is_a_target_on_another_rank_is_no_finding():
    """Data that are cut by class: each rank lacks a class of its own."""

    def on_rank(rank, lacking):
        counts = np.array([0.0 if c == lacking else 16.0 for c in range(4)])
        row = lambda surprise: (*counts, *[12.0] * 4, 48 * surprise)  # noqa: E731
        calls = [LossCall("cross_entropy", "mean", 0, 48, ((), ()), classes=row(2.0 if i < 3 else 1.0)) for i in range(40)]
        place, memory = Place(rank=rank, world_size=2), dict[str, Any]()
        at = lambda i: Evidence(i, place, Facts(LossCalls((calls[i],))), None, AuditPlan(), memory=dict(memory))  # noqa: E731
        for i in range(39):
            memory["absent_classes"] = absent_classes.remember(at(i))
        return at(39)

    def message(evidence):
        rows = absent_classes.shares(evidence)
        return decode(encode(Peer(evidence.place.rank, {"dp": evidence.place.rank}, {}, {}, (), rows, {}, {}), 39))[0]

    def judged(*lacking):
        ranks = [on_rank(rank, c) for rank, c in enumerate(lacking)]
        peers = tuple(map(message, ranks))
        return [absent_classes.check(Evidence(39, e.place, e.facts, None, e.plan, memory=e.memory, peers=peers)) for e in ranks]

    assert judged(1, 2) == [[], []]
    assert [f.names for found in judged(1, 1) for f in found] == [("class 1",), ("class 1",)]
    assert absent_classes.check(on_rank(0, 1)) == []  # the ranks were not compared
