"""An early output of a causal model depends on no later input: what is read off the graph, against autograd's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainprobe
from benchmarks.sight.language import ByteNet, NormalisedOverTime, Recurrent, Rotary
from benchmarks.sight.parts import Causal, Transformer, causal
from trainprobe.engine.capture.dependence import attentions, equal_places, graph_of, looked_up, reach

VOCAB, TIME, ROWS = 20, 12, 4


def tokens(number: int) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(number))


class ByHand(nn.Module):
    """A language model whose attention is written out; with a prefix, its first places see each other."""

    def __init__(self, prefix: int = 0) -> None:
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 24), nn.Linear(8, VOCAB)
        self.prefix = prefix

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = causal(ids.shape[1])
        seen[: self.prefix, : self.prefix] = True
        shares = (q @ k.transpose(1, 2)).masked_fill(~seen, float("-inf")).softmax(-1)
        return self.head(x + shares @ v)


class Averaged(Causal):
    """Adds the mean over the whole row."""

    def forward(self, ids: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        x = self.features(ids, causal(ids.shape[1]))
        return self.head(x + x.mean(1, keepdim=True))


@pytest.mark.parametrize(
    "make",
    [ByHand, lambda: Averaged(VOCAB, TIME), ByteNet, Recurrent, lambda: Causal(VOCAB, TIME), lambda: Transformer(VOCAB, TIME)],
)
def test_what_is_reached_is_what_autograd_says(make):
    torch.manual_seed(0)
    model, ids = make(), tokens(0)[:, :-1]
    caught: list[Tensor] = []
    model.tokens.register_forward_hook(lambda _, given, result: caught.append(result))
    out = model(ids, True) if isinstance(model, Recurrent) else model(ids)
    nodes = graph_of(out)
    inputs = looked_up(nodes, ids.shape)
    assert [node for node, _ in inputs] == [caught[0].grad_fn]
    found = reach(out, nodes, inputs, [(out.grad_fn, 0)])
    early = out[-1, : TIME // 2]
    seed = (torch.arange(early.numel()) * 1.7).cos().reshape(early.shape)
    (wanted,) = torch.autograd.grad((early * seed).sum(), caught[0])
    size = wanted.abs().amax(2)
    row = size[-1]
    expected = [size.max(), row[TIME // 2 :].max(), size[:-1].max(), (row > 1e-6 * size.max()).nonzero().max()]
    torch.testing.assert_close(found[inputs[0]], torch.stack([n.float() for n in expected]))


@pytest.mark.parametrize(
    ("make", "counted"),
    [
        (lambda: Causal(VOCAB, TIME), (2, 0, 2, 0, 0)),
        (lambda: Transformer(VOCAB, TIME), (2, 0, 0, 0, 0)),
        (ByHand, (1, 0, 0, 1, 1)),
        (lambda: ByHand(3), (1, 0, 0, 0, 0)),
        (ByteNet, (0, 0, 0, 0, 0)),
    ],
)
def test_attentions_that_are_causal_by_themselves_are_counted(make, counted):
    out = make()(tokens(0)[:, :-1])
    found, told, *masks = attentions(graph_of(out), TIME)
    assert (found, told, *(sum(map(bool, kind)) for kind in masks)) == counted


class Own(torch.autograd.Function):
    """The identity, by the program's own hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_graphs_that_must_not_be_run_are_left_alone():
    x = torch.randn(ROWS, TIME, 4, requires_grad=True)
    assert len(graph_of((x * 2).exp().exp())) == 4
    assert graph_of(Own.apply(x * 2).exp()) == []
    assert graph_of(functional.batch_norm(x * 2, None, None, training=True)) == []
    freed = (x * 2).exp()
    out = freed.exp().sum(-1)
    freed.untyped_storage().resize_(0)
    assert graph_of(out) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_that_became_equal_are_counted(dtype):
    ids = torch.zeros(1, 300, dtype=torch.long)
    numbers = [int(n) for n in equal_places(graph_of(Rotary(16, dtype)(ids)), 300, (256, 2048))]
    rounded = torch.arange(300).to(dtype)
    equal = int((rounded[256:] == rounded[255:-1]).sum())
    assert numbers == [44, equal, 0, 0, 0, equal]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_are_rounded_in_the_model_are_named(tmp_path, dtype):
    torch.manual_seed(0)
    model = Rotary(16, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(0, 32, (2, 301), generator=torch.Generator().manual_seed(0))
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", audit={"every": 1}, monitor=False) as probe, probe.step():
        functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    assert [f.rule for f in probe.findings] == (["held_numbers"] if dtype == torch.bfloat16 else [])


def told(folder, model: nn.Module, forward: Callable[[Tensor], Tensor], audit: bool = True, steps: int = 1) -> list[Any]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with trainprobe.watch(model, optimizer, output=folder / "out", audit=audit and {"every": 1}, monitor=False) as probe:
        for step in range(steps):
            ids = tokens(step)
            with probe.step():
                optimizer.zero_grad()
                functional.cross_entropy(forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
                optimizer.step()
    return [f for f in probe.findings if f.rule == "dependence"]


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Causal(VOCAB, TIME), None),
        (lambda: Transformer(VOCAB, TIME), None),  # hides nothing on purpose, as far as anyone knows
        (ByHand, None),
        (lambda: ByHand(8), None),
        (ByteNet, None),
        (lambda: Averaged(VOCAB, TIME), "root"),
        (lambda: ByteNet(1), "root"),
    ],
)
def test_a_model_that_looks_ahead_is_named(tmp_path, make, place):
    torch.manual_seed(0)
    model = make()
    assert [f.site.name for f in told(tmp_path, model, model)] == ([place] if place else [])


def test_the_module_that_looks_ahead_is_named(tmp_path):
    torch.manual_seed(0)
    model = Causal(VOCAB, TIME)
    model.norm = NormalisedOverTime()
    (finding,) = told(tmp_path / "norm", model, model)
    assert finding.site.name == "norm" and "through norm, " in finding.message
    model = Transformer(VOCAB, TIME)
    (finding,) = told(tmp_path / "ones", model, lambda ids: model(ids, causal(TIME).float()))
    assert finding.site.name == "blocks.1" and "blocks.1.qkv" in finding.message


def test_rows_that_are_mixed_are_named(tmp_path):
    torch.manual_seed(0)
    model = Recurrent()
    assert told(tmp_path / "apart", model, lambda ids: model(ids, False)) == []
    (finding,) = told(tmp_path / "mixed", model, lambda ids: model(ids, True))
    assert "other rows" in finding.message


class TimeFirst(nn.Module):
    """A causal encoder of torch that takes tokens [time, rows], as it does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(ids), mask=nn.Transformer.generate_square_subsequent_mask(len(ids))))


@pytest.mark.parametrize("rows", [4, 12])
def test_earlier_places_are_no_other_rows_where_time_comes_first(tmp_path, rows):
    torch.manual_seed(0)
    model = TimeFirst()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", audit={"every": 1}, monitor=False) as probe:
        for _ in range(2):
            ids = torch.randint(0, VOCAB, (TIME + 1, rows))
            with probe.step():
                optimizer.zero_grad()
                functional.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()).backward()
                optimizer.step()
    assert [f.message for f in probe.findings if f.rule == "dependence"] == []


class Checkpointed(Averaged):
    """Computes its activations again."""

    def features(self, ids: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return self.norm(x)


def test_nothing_of_the_program_notices(tmp_path):
    """Weights, random states, hooks and what hooks see are those of the same training without the audit."""
    ends = []
    for audit in (False, True):
        torch.manual_seed(0)
        model, calls = Averaged(VOCAB, TIME, dropout=0.1), []
        model.norm.register_full_backward_hook(lambda *_, calls=calls: calls.append("module"))

        def forward(ids: Tensor, model: Any = model, calls: Any = calls) -> Tensor:
            out = model(ids)
            out.register_hook(lambda gradient: calls.append(float(gradient.sum())))
            out.retain_grad()
            return out

        found = told(tmp_path / str(audit), model, forward, audit, steps=3)
        assert bool(found) is False  # its full hook is a function of the program's own
        ends.append((torch.nn.utils.parameters_to_vector(model.parameters()), torch.get_rng_state(), calls))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1]) and ends[0][2] == ends[1][2]


def test_a_tensor_hook_runs_once_where_the_graph_was_looked_at(tmp_path):
    ends = []
    for audit in (False, True):
        torch.manual_seed(0)
        model, calls = Averaged(VOCAB, TIME, dropout=0.1), []

        def forward(ids: Tensor, model: Any = model, calls: Any = calls) -> Tensor:
            out = model(ids)
            out.register_hook(lambda gradient: calls.append(float(gradient.sum())))
            out.retain_grad()
            return out

        model.norm.register_forward_hook(
            lambda _, given, out, calls=calls: out.register_hook(lambda g: calls.append(0.0)) and None
        )
        found = told(tmp_path / str(audit), model, forward, audit, steps=3)
        assert bool(found) is audit
        ends.append((torch.nn.utils.parameters_to_vector(model.parameters()), torch.get_rng_state(), calls))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1]) and ends[0][2] == ends[1][2]


def test_activations_that_are_computed_again_are_left_alone(tmp_path):
    torch.manual_seed(0)
    model = Checkpointed(VOCAB, TIME)
    runs: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    assert told(tmp_path, model, model) == [] and len(runs) == 2
