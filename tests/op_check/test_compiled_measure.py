"""The compiled sums of a float32 result are those that torch works out."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from trainprobe.op_check import measure
from trainprobe.op_check.measure import Allowance


@pytest.mark.parametrize("n", [1, 7, 8, 4096, 70001])
def test_the_compiled_sums_are_torchs(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure.kernel is not None, "the package was built without its compiled part"
    torch.manual_seed(n)
    r = torch.randn(n, dtype=torch.float64) * torch.logspace(-30, 3, n, dtype=torch.float64)
    noise = r.abs() * torch.rand(n, dtype=torch.float64) * 1e-7
    y = (r + noise * torch.randn(n, dtype=torch.float64) * 3).float()
    y[n // 2] += 1e-5
    fast = asdict(measure.measured(y, r, Allowance.of(noise)))
    monkeypatch.setattr(measure, "kernel", None)
    slow = asdict(measure.measured(y, r, Allowance.of(noise)))
    assert fast == pytest.approx(slow, rel=1e-9)
    assert (fast["same"], fast["index"], fast["beyond"]) == (slow["same"], slow["index"], slow["beyond"])
    assert fast["beyond"] >= 1


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_is_left_to_torch(odd: float, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.ones(100), torch.ones(100, dtype=torch.float64), torch.ones(100, dtype=torch.float64) * 1e-8]
    given[which][40] = odd
    fast = asdict(measure.measured(given[0], given[1], Allowance.of(given[2])))
    monkeypatch.setattr(measure, "kernel", None)
    assert fast == asdict(measure.measured(given[0], given[1], Allowance.of(given[2])))


@pytest.mark.parametrize("sizes", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [7, 70001])
def test_a_noise_that_is_not_written_out_gives_the_same_sums(n: int, sizes: torch.dtype | None) -> None:
    assert measure.kernel is not None, "the package was built without its compiled part"
    torch.manual_seed(n)
    r = torch.randn(n, dtype=torch.float64)
    y = (r + r * torch.randn(n, dtype=torch.float64) * 2e-7).float()
    size = None if sizes is None else torch.rand(n, dtype=torch.float64).to(sizes)
    by_parts, written = (Allowance(r, 2.0**-24, size, 3e-8) for _ in range(2))
    whole = r.abs() * 2.0**-24 + (0 if size is None else size.double() * 3e-8)
    assert torch.equal(written.tensor, whole)
    assert asdict(measure.measured(y, r, by_parts)) == asdict(measure.measured(y, r, written))
    assert by_parts.relative > 0, "it was written out for the compiled sums"
