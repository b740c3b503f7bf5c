"""The audit on Megatron-core in its layouts: silent on healthy training, and right about planted faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch

SCRIPT = Path(__file__).with_name("train_audited.py")
TWO = (
    "tp2", "pp2", "vpp2", "ep2", "ep2 grouped", "dp2", "dp2 distributed", "dp2 distributed gather", "dp2 bf16", "dp2 precise",
    "dp2 fp16",
)  # fmt: skip
FOUR = ("tp2 dp2", "tp2 pp2")
NORM = "decoder.final_layernorm.weight"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
FAULTS = {  # layout@fault@name → the relation that names it first, and how
    f"dp2 distributed@drift@{FC1}": ("replicas", 2, FC1),
    f"dp2@partial@{FC1}": ("replicas", 2, FC1),
    f"tp2@partial@{NORM}": ("replicas", 2, NORM),
    "tp2@random@": ("random_regions", 0, "random state of tensor-parallel regions"),
    "dp2 distributed@norm@": ("clipping", 0, "clip coefficient"),
    f"ep2@partial@{NORM}": ("replicas", 2, NORM),
    f"tp2 dp2@drift@{NORM}": ("replicas", 2, NORM),
}
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.fixture(scope="module")
def folder(require, tmp_path_factory) -> Path:
    require("megatron.core")
    folder = tmp_path_factory.mktemp("megatron")
    launch(SCRIPT, 2, str(folder), *TWO, *(fault for fault in FAULTS if not fault.startswith("tp2 dp2")), timeout=600)
    launch(SCRIPT, 4, str(folder), *FOUR, *(fault for fault in FAULTS if fault.startswith("tp2 dp2")), timeout=600)
    return folder


def found(folder: Path, layout: str, fault: str = "") -> list[list]:
    """Return what each rank found: [rule, severity, step, name, message]."""
    ranks = 4 if layout in FOUR else 2
    stem = f"{layout} {fault}".strip()
    return [json.loads((folder / f"{stem}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_a_healthy_training_raises_no_alarm(folder, layout):
    assert all(rank == [] for rank in found(folder, layout))


@pytest.mark.parametrize("planted", FAULTS)
def test_a_planted_fault_is_found_at_once_by_its_global_name(folder, planted):
    layout, fault, _ = planted.split("@")
    rule, step, name = FAULTS[planted]
    for rank, told in enumerate(found(folder, layout, fault)):
        named = [(f[0], f[2], f[3]) for f in told]
        wanted = "untouched_between_steps" if fault == "drift" and rank == 1 else rule
        if layout == "tp2 dp2" and rank == 2:
            continue  # in neither group of rank 1
        assert (wanted, step, name) in named[:1], (rank, told)
