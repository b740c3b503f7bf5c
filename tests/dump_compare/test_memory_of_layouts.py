"""Comparing stored tensors of two layouts holds one joined tensor and one shard of it at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainprobe
from trainprobe.engine.core.records import Place

RANKS, LAYERS, ROWS = 4, 4, 512
MEGABYTES = 32  # of one whole tensor
PEAK = """
import sys
from trainprobe.cli import main
code = main(sys.argv[1:])
print(code, next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


class Layers(nn.Module):
    """Layers that are given the same; each rank holds a part of the columns of their results."""

    def __init__(self, columns: int, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, columns, bias=False) for _ in range(LAYERS))
        for layer in self.layers:
            layer.weight = nn.Parameter((8 * layer.weight.detach()).round().chunk(ranks)[rank].clone())  # sums are exact

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def dump(folder: Path, megabytes: float, ranks: int) -> Path:
    columns = int(megabytes * 2**20) // (4 * ROWS)
    plan = {"level": "L0", "task": "tensor", "tensor_format": "pt", "modules": ["layers.*"], "data": ["output"]}
    for rank in range(ranks):
        place = Place(rank, ranks, {"tp": (rank, ranks)} if ranks > 1 else {})
        plan["on_existing"] = "continue"
        with trainprobe.Probe(plan, place=place, output=folder, sinks=["dump"], console=False) as probe:
            model = Layers(columns, rank, ranks)
            probe.open(model)
            with probe.step(), torch.no_grad():
                model(torch.ones(ROWS, 4))
    return folder


def peak(folder: Path, megabytes: float) -> tuple[int, float]:
    """Return the exit code and the largest memory of a comparison, in MiB."""
    rules = folder / "rules.yaml"
    folder.mkdir()
    rules.write_text('rules:\n  - {module: "*", slot: "output*", tp: 1}\n')
    sides = [str(dump(folder / name, megabytes, ranks)) for name, ranks in (("one", 1), ("four", RANKS))]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "dump-compare", *sides, "--layout", str(rules)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},  # what is freed is given back
        capture_output=True,
        text=True,
        check=True,
    )
    code, kibibytes = done.stdout.split()[-2:]
    return int(code), int(kibibytes) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the largest memory is read from /proc")
def test_one_joined_tensor_and_one_shard_are_held_at_a_time(tmp_path):
    code, least = peak(tmp_path / "small", 1 / 32)
    assert code == 0
    code, most = peak(tmp_path / "large", MEGABYTES)
    assert code == 0
    assert least + 1.5 * MEGABYTES < most  # the elements were compared
    # 3.25 wholes: that of either side, a shard, and what loading leaves; it was 4.0 when all shards were held beside the whole
    assert most - least < 3.6 * MEGABYTES, (most, least)
