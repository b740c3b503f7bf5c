"""Spectral norm and stable rank against the singular values that NumPy finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.capture.features.weight_spectra import FIRST, spectrum


def exact(w):
    values = np.linalg.svd(w.detach().double().flatten(1).numpy(), compute_uv=False)
    return values[0], (values**2).sum() / values[0] ** 2


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def standing_apart():
    w = drawn(60, 90) * 0.1
    return w + 5 * torch.outer(drawn(60), drawn(90)) / 70


@pytest.mark.parametrize(
    ("weight", "tolerance"),
    [(standing_apart(), 1e-6), (drawn(64, 64), 0.02), (drawn(300, 40), 0.02), (drawn(8, 4, 3, 3), 0.02), (torch.eye(12), 1e-6)],
)
def test_the_first_step_is_near_and_later_ones_come_nearer(weight, tolerance):
    sigma, rank, end = spectrum(weight, None, FIRST)
    want_sigma, want_rank = exact(weight)
    assert float(sigma) == pytest.approx(want_sigma, rel=tolerance)
    assert float(sigma) <= want_sigma * (1 + 1e-6)
    for _ in range(60):
        sigma, rank, end = spectrum(weight, end, 4)
    assert (float(sigma), float(rank)) == (pytest.approx(want_sigma, rel=1e-3), pytest.approx(want_rank, rel=2e-3))


def test_a_matrix_that_the_ones_vector_does_not_see_is_seen():
    w = drawn(30, 50)
    w = w - w.mean(1, keepdim=True)  # W·1 = 0: an iteration that begins there would find nothing
    assert float(spectrum(w, None, FIRST)[0]) == pytest.approx(exact(w)[0], rel=0.05)


def test_zeros_have_no_norm_and_no_rank():
    sigma, rank, end = spectrum(torch.zeros(4, 5), None, FIRST)
    assert (float(sigma), float(rank)) == (0, 0)
    assert end.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    w = standing_apart().to(dtype)
    assert float(spectrum(w, None, FIRST)[0]) == pytest.approx(exact(w)[0], rel=1e-5)


def run(folder, features, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    told, weights = [], []
    plan = {"level": "off", "sinks": ["memory"], "monitor": {"features": features}}
    with trainprobe.watch(model, optimizer, output=folder, on_error="raise", **plan) as probe:
        for step in range(steps):
            weights.append(model[0].weight.detach().clone())
            probe.begin_step(step)
            optimizer.zero_grad()
            model(torch.randn(4, 7)).square().sum().backward()
            optimizer.step()
            told.append({(f.name, f.slot): f.numbers.tolist() for f in probe.end_step().features})
    return told, weights, torch.get_rng_state()


def test_weights_are_looked_at_as_they_are_before_the_step_and_no_random_number_is_drawn(tmp_path):
    told, weights, state = run(tmp_path / "on", {"weights": True})
    for step, weight in zip(told, weights, strict=True):
        assert set(step) == {(f"{i}.weight", slot) for i in (0, 2) for slot in ("spectral_norm", "stable_rank")}
        assert step["0.weight", "spectral_norm"][0] == pytest.approx(exact(weight)[0], rel=1e-3)
    bare, untouched, bare_state = run(tmp_path / "off", {})
    assert bare == [{}, {}, {}]
    assert all(map(torch.equal, weights, untouched))
    assert torch.equal(state, bare_state)


def test_patterns_and_intervals_choose(tmp_path):
    told, _, _ = run(tmp_path, {"weights": {"names": "2.*", "every": 2}})
    assert [sorted(name for name, _ in step) for step in told] == [["2.weight"] * 2, [], ["2.weight"] * 2]
