"""A tensor of more elements than anybody can walk, over a few bytes of memory, costs a note and no time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, STATS

ENDLESS = 2**40


class Takes(nn.Linear):
    """A layer that is handed something endless beside its input."""

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + beside[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("flags", "native"), [(STATS | CHECKSUM, True), (STATS | CRC32, True), (STATS, False)])
def test_what_would_have_to_be_walked_is_refused_with_its_size(flags, native):
    stats_rows = TorchStatsRows(flags, native=native)
    endless = torch.ones(1).expand(ENDLESS)
    assert stats_rows.add(endless) == -1
    assert stats_rows.refusal(endless).startswith(f"expanded: {ENDLESS} elements over 4 bytes of memory")
    assert stats_rows.add(torch.ones(1).expand(1000)) == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plan", [{"summary": "checksum"}, {"summary": "md5"}, {"native": False}, {"audit": {"every": 1}}])
def test_a_step_that_meets_one_is_recorded(tmp_path, plan):
    model = Takes(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, level="mix", output=tmp_path / "out", **plan) as probe, probe.step():
        model(torch.ones(3, 2), torch.ones(1).expand(ENDLESS)).sum().backward()
        optimizer.step()
    assert probe.collected == 1
    assert probe.guard.tripped is None
