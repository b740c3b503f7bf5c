"""Reducing on a device reads nothing back: on the meta device, which has no data, any read would raise."""

from __future__ import annotations

import pytest
import torch
from reduction_oracle import ALL_DTYPES

from trainprobe.engine.arrays import torch_extras
from trainprobe.engine.arrays.torch_checksum import crc32_register
from trainprobe.engine.arrays.torch_reduce import reduce_tensor
from trainprobe.engine.stats.partials import CHECKSUM, STATS, STD, SUBNORMAL


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (700, 800)])
def test_partials_and_fingerprint_wait_for_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    row, checksum = reduce_tensor(torch.empty(shape, dtype=dtype, device="meta"), STATS | CHECKSUM | STD | SUBNORMAL)
    assert row.shape == (12,) and row.dtype == torch.float64
    assert checksum is not None and checksum.dtype == torch.int64


def test_crc32_waits_for_nothing() -> None:
    assert crc32_register(torch.empty(50, 70, device="meta").t()).dtype == torch.int64


def test_extras_wait_for_nothing() -> None:
    t = torch.empty(50, 70, device="meta")
    assert torch_extras.bin_counts([0, 1, 2])(t).shape == (2,)
    assert torch_extras.quantiles([0, 0.5])(t).shape == (2,)
    assert torch_extras.exponent_counts(t).dim() == 1


def test_temporaries_of_a_large_tensor_stay_small() -> None:
    t = torch.ones(1 << 22)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        reduce_tensor(t, STATS | CHECKSUM | STD)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < 16 << 20
