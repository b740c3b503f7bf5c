"""Attention features against NumPy in float64, in every way in which torch programs attend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import trainprobe
from trainprobe.engine.capture.features.attention import attention_logits, of_logits, spread

BATCH, HEADS, LENGTH, SIZE = 3, 4, 17, 8


def oracle(q, k, mask=None, scale=None, causal=False):
    """Return entropy, largest logit and peak of each head, by their definition, row by row in float64."""
    q, k = (x.detach().double().numpy() for x in (q, k))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = q @ k.swapaxes(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    if mask is not None:
        mask = np.broadcast_to(mask.numpy(), scores.shape)
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    return of_scores(scores)


def of_scores(scores):
    found = []
    for head in range(scores.shape[1]):
        entropies, peaks, largest = [], [], -np.inf
        for row in scores[:, head].reshape(-1, scores.shape[-1]):
            if np.all(row == -np.inf):
                continue
            p = np.exp(row - row.max())
            p /= p.sum()
            entropies.append(-sum(x * math.log(x) for x in p if x > 0))
            peaks.append(p.max())
            largest = max(largest, row.max())
        found.append((np.mean(entropies), largest, np.mean(peaks)))
    return np.array(found).T


def draw(heads=HEADS, length=LENGTH):
    return 2 * torch.randn(BATCH, heads, length, SIZE, generator=torch.Generator().manual_seed(heads + length))


def some_mask(kind):
    generator = torch.Generator().manual_seed(5)
    if kind == "float":
        return torch.randn(1, HEADS, LENGTH, LENGTH, generator=generator)
    keep = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) > 0.4
    keep[1, 0, 3] = False  # a row in which nothing may be seen
    return keep


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "float", "bool"])
@pytest.mark.parametrize("heads_of_keys", [HEADS, 2, 1])
def test_numbers_of_each_head_are_those_of_numpy(heads_of_keys, mask, causal):
    q, k, m = draw(), draw(heads_of_keys), some_mask(mask) if mask else None
    logits = attention_logits(q, k, m, causal=causal, scale=None, rows=LENGTH, sequences=BATCH)
    found = np.stack([x.numpy() for x in of_logits(logits)])
    np.testing.assert_allclose(found, oracle(q, k, m, causal=causal), rtol=2e-5)


def test_of_long_sequences_the_rows_that_are_said_are_looked_at():
    q, k = draw(length=50), draw(length=50)
    mask = torch.rand(BATCH, 1, 50, 50, generator=torch.Generator().manual_seed(1)) > 0.3
    places, sequences = spread(50, 7, "cpu"), spread(BATCH, 2, "cpu")
    assert places.tolist() == [6, 13, 20, 27, 34, 41, 49]
    logits = attention_logits(q, k, mask, causal=True, scale=0.3, rows=7, sequences=2)
    q, k, mask = (x[sequences] for x in (q, k, mask))
    whole = q @ k.transpose(-1, -2) * 0.3
    whole = whole.masked_fill(~(mask & torch.ones(50, 50, dtype=torch.bool).tril()), -torch.inf)
    np.testing.assert_allclose(
        np.stack([x.numpy() for x in of_logits(logits)]), of_scores(whole[:, :, places].double().numpy()), rtol=2e-5
    )


def test_a_nan_shows_in_the_head_that_has_it():
    q, k = draw(), draw()
    q[0, 2, 5, 1] = torch.nan
    for numbers in of_logits(attention_logits(q, k, None, causal=False, scale=None, rows=LENGTH, sequences=BATCH)):
        assert numbers.isnan().tolist() == [False, False, True, False]


class Attention(nn.Module):
    """Attends in one of the ways that programs use; keeps what it attended with."""

    def __init__(self, way):
        super().__init__()
        self.way, self.qkv = way, nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, SIZE).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        self.kept = (q.detach(), k.detach())
        if self.way == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE)
            soft = {
                "functional": lambda s: functional.softmax(s, dim=-1, dtype=torch.float32),
                "torch": lambda s: torch.softmax(s, -1),
                "method": lambda s: s.softmax(dim=-1),
                "module": self.softmax,
            }[self.way]
            y = soft(scores) @ v
        return y.transpose(1, 2).reshape(b, t, c)


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.attn, self.head = Attention(way), nn.Linear(HEADS * SIZE, 5)

    def forward(self, x):
        return self.head(self.attn(x)).softmax(-1)  # of three dimensions: no attention


def train(folder, model, watched=True, steps=2, **plan):
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"level": "off", "sinks": ["memory"], "monitor": {"features": {"attention": True}}, **plan}
    features = []
    with trainprobe.watch(model, optimizer, output=folder, on_error="raise", **options) as probe:
        for step in range(steps):
            x = torch.randn(BATCH, LENGTH, HEADS * SIZE)
            if watched:
                probe.begin_step(step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step_data = probe.end_step() if watched else None
            features.append(list(step_data.features) if step_data else [])
    return features, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("level", ["off", "mix"])
@pytest.mark.parametrize("way", ["sdpa", "functional", "torch", "method", "module"])
def test_every_way_to_attend_is_seen_once_and_changes_no_bit(tmp_path, way, level):
    model = Model(way)
    features, weights = train(tmp_path / "on", model, level=level)
    q, k = model.attn.kept
    name = "attn.softmax" if way == "module" else "attn"
    found = {f.slot: f.numbers for f in features[-1]}
    assert [(f.name, f.slot) for f in features[-1]] == [(name, f"attention_{what}") for what in ("entropy", "logit", "peak")]
    np.testing.assert_allclose(np.stack(list(found.values())), _sampled_oracle(q, k), rtol=2e-5)
    bare = train(tmp_path / "off", Model(way), watched=False)[1]
    assert all(map(torch.equal, weights, bare))


def _sampled_oracle(q, k):
    assert BATCH <= 4 and LENGTH <= 64
    return oracle(q, k)


@pytest.mark.parametrize("weights", [False, True])
def test_the_attention_of_torch_is_seen_by_heads(tmp_path, weights):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(HEADS * SIZE, HEADS, batch_first=True)

        def forward(self, x):
            return self.mha(x, x, x, need_weights=weights)[0]

    model = Attending()
    features, trained = train(tmp_path / "on", model)
    assert {f.slot: f.numbers.shape for f in features[0]} == {
        f"attention_{what}": (HEADS,) for what in ("entropy", "logit", "peak")
    }
    assert all(0 < x < math.log(LENGTH) + 1e-6 for f in features[0] if f.slot == "attention_entropy" for x in f.numbers)
    assert all(map(torch.equal, trained, train(tmp_path / "off", Attending(), watched=False)[1]))


def test_numbers_are_taken_in_float32_under_autocast(tmp_path):
    model = Model("sdpa")
    forward = model.forward

    def lower(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(x).float()

    model.forward = lower
    features, _ = train(tmp_path / "on", model, steps=1)
    q, k = (x.float() for x in model.attn.kept)
    assert model.attn.kept[0].dtype == torch.bfloat16
    np.testing.assert_allclose(np.stack([f.numbers for f in features[0]]), oracle(q, k), rtol=2e-5)


def test_a_recomputed_forward_is_not_counted_twice(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Saving(Model):
        def forward(self, x):
            return self.head(checkpoint(self.attn, x, use_reentrant=False))

    features, _ = train(tmp_path, Saving("sdpa"))
    assert [f.slot for f in features[0]] == ["attention_entropy", "attention_logit", "attention_peak"]


def test_functions_are_put_back_and_a_model_without_attention_is_told(tmp_path):
    before = [functional.scaled_dot_product_attention, functional.softmax, torch.softmax, torch.Tensor.softmax]
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"level": "off", "sinks": ["parquet"], "monitor": {"features": {"attention": True}}}
    notes = []
    with trainprobe.watch(model, optimizer, output=tmp_path, on_error="raise", **options) as probe:
        for step in range(3):
            probe.begin_step(step)
            assert functional.softmax is not before[1]
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            notes += probe.end_step().notes
            assert [functional.scaled_dot_product_attention, functional.softmax, torch.softmax, torch.Tensor.softmax] == before
    assert "softmax" not in vars(torch.Tensor)
    assert sum("no attention was seen" in note for note in notes) == 1


def test_a_compiled_region_runs_as_without_the_tool_and_is_compiled_once(tmp_path):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, plain = CompileCounter(), functional.scaled_dot_product_attention
    model = nn.Sequential(Attention("sdpa"), nn.Linear(HEADS * SIZE, 5))
    inside = []

    class Seeing(nn.Module):
        def __init__(self, attn):
            super().__init__()
            self.attn = torch.compile(attn, backend=counter)
            attn.register_forward_pre_hook(
                torch._dynamo.disable(lambda *_: inside.append(functional.scaled_dot_product_attention))
            )

        def forward(self, x):
            return self.attn(x)

    model[0] = Seeing(model[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"level": "off", "sinks": ["parquet"], "monitor": {"step": "every 2", "features": {"attention": True}}}
    notes, features = [], []
    with trainprobe.watch(model, optimizer, output=tmp_path, on_error="raise", **plan) as probe:
        for step in range(4):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.randn(BATCH, LENGTH, HEADS * SIZE)).square().mean().backward()
                optimizer.step()
    from trainprobe.engine.storage.dumps.log import read_log

    for step_data in read_log(tmp_path):
        notes += step_data.notes
        features += step_data.features
    assert features == []
    assert all(function is plain for function in inside) and inside
    assert counter.frame_count <= 2
    first = counter.frame_count
    model(torch.randn(BATCH, LENGTH, HEADS * SIZE))
    assert counter.frame_count == first
    assert any("no attention was seen" in note for note in notes)
