"""DDP and FSDP2 in real processes: the same bits, no collective of the probe's own, and one folder a rank."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import launch


@functools.cache
def run(kind: str, ranks: int, level: str | None) -> tuple[Path, list[dict]]:
    """Train once; return the dump folder and what each rank left."""
    if kind == "fsdp2" and torch.__version__ < (2, 6):
        pytest.skip("torch before 2.6 has no torch.distributed.fsdp.fully_shard")
    folder = Path(tempfile.mkdtemp(prefix=f"trainprobe_{kind}_{ranks}_"))
    plan = level and {"output": str(folder / "out"), "level": level, "step": [1, 2]}
    launch(Path(__file__).with_name("train_sharded.py"), ranks, kind, str(folder), json.dumps(plan))
    return folder / "out", [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def dump(output: Path, rank: int, step: int = 1) -> dict:
    return json.loads((output / f"step{step}" / f"rank{rank}" / "dump.json").read_text())


def leaves(node):
    if isinstance(node, dict):
        if {"type", "dtype", "shape"} <= set(node):
            yield node
        for value in node.values():
            yield from leaves(value)
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value)


RUNS = [("ddp", 2, "L0"), ("ddp", 2, "mix"), ("fsdp2", 2, "L0"), ("fsdp2", 2, "mix"), ("ddp", 4, "mix"), ("fsdp2", 4, "mix")]
runs = pytest.mark.parametrize(("kind", "ranks", "level"), RUNS)


@pytest.mark.proves("PyTorch", {"ddp": "DDP", "fsdp2": "FSDP2"}, ranks=(2, 4))
@runs
def test_every_rank_trains_to_the_same_bits_with_and_without_the_probe(kind, ranks, level):
    bare, watched = run(kind, ranks, None)[1], run(kind, ranks, level)[1]
    assert [{k for k in b["bits"] if b["bits"][k] != w["bits"][k]} for b, w in zip(bare, watched, strict=True)] == [
        set()
    ] * ranks


@runs
def test_the_probe_issues_no_collective(kind, ranks, level):
    bare, watched = run(kind, ranks, None)[1], run(kind, ranks, level)[1]
    assert bare[0]["collectives"], "the count itself must see the training's own collectives"
    assert [w["collectives"] for w in watched] == [b["collectives"] for b in bare]


@runs
def test_each_rank_writes_its_own_folder_for_the_steps_it_was_asked_for(kind, ranks, level):
    output, _ = run(kind, ranks, level)
    found = {str(path.parent.relative_to(output)) for path in output.glob("step*/rank*/dump.json")}
    assert found == {f"step{step}/rank{rank}" for step in (1, 2) for rank in range(ranks)}


@runs
def test_ranks_that_saw_different_data_wrote_different_numbers(kind, ranks, level):
    output, _ = run(kind, ranks, level)
    assert dump(output, 0)["data"] != dump(output, 1)["data"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_tensors_carry_their_mesh_and_placements(ranks):
    output, _ = run("fsdp2", ranks, "mix")
    sharded = [leaf for leaf in leaves(dump(output, 0)["data"]) if leaf["type"].endswith("DTensor")]
    assert sharded
    assert all(leaf["device_mesh"] == list(range(ranks)) and leaf["placements"] for leaf in sharded)


@runs
def test_gradients_of_all_parameters_are_recorded(kind, ranks, level):
    output, watched = run(kind, ranks, level)
    wanted = {
        name.removeprefix("step 0 gradient ").removeprefix("module.")
        for name in watched[0]["bits"]
        if name.startswith("step 0 gr")
    }
    data = dump(output, 0)["data"]
    found = {
        f"{key.split('.', 1)[1].rsplit('.', 3)[0]}.{name}" for key in data if ".parameters_grad." in key for name in data[key]
    }
    assert found == wanted


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_that_python_issues_are_recorded_at_mix(ranks):
    """Those of FSDP2 are; DDP reduces from C++, where no Python call can be seen."""
    output, _ = run("fsdp2", ranks, "mix")
    assert any(key.startswith("Distributed.") for key in dump(output, 0)["data"])
