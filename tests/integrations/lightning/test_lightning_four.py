"""Lightning on four ranks: DDP, and tensor parallel 2 × FSDP2 2 (ModelParallelStrategy), whose DTensors are cut twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.records import recorded, steps_of


@pytest.fixture(scope="module")
def four(require, tmp_path_factory) -> tuple[Path, list[dict]]:
    require("lightning.pytorch")
    folder = tmp_path_factory.mktemp("four")
    launch(Path(__file__).with_name("train_four.py"), 4, str(folder), timeout=400)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def of_parameters(numbers: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if " " in name and " rank" not in name}


@pytest.mark.proves("Lightning", {"ddp": "DDP", "cut": "TP 2 × FSDP2 2"}, ranks=4)
@pytest.mark.parametrize("kind", ["ddp", "cut"])
def test_each_of_four_ranks_trains_to_the_same_bits_with_and_without_the_probe(four, kind):
    assert [told[f"{kind} different bits"] for told in four[1]] == [[]] * 4


@pytest.mark.proves("Lightning", {"ddp": "DDP", "cut": "TP 2 × FSDP2 2"}, ranks=4)
@pytest.mark.parametrize("kind", ["ddp", "cut"])
def test_the_audit_finds_nothing_in_a_healthy_training_on_four_ranks(four, kind):
    assert [told[f"{kind} healthy"] for told in four[1]] == [[]] * 4


@pytest.mark.proves("Lightning", "DDP", ranks=4)
def test_numbers_under_ddp_of_four_are_those_of_one_process_of_plain_torch(four):
    from tests.integrations.lightning.small_lightning import CLIP, batches, plain_torch

    steps = plain_torch(2, CLIP, [batches(rank) for rank in range(4)])
    for rank in range(4):
        found = recorded(four[0] / "ddp", rank)
        for step, numbers in enumerate(steps):
            wanted = of_parameters(numbers)
            wanted |= {
                name.replace(f" rank{rank}", " grad_unreduced"): v for name, v in numbers.items() if f" rank{rank}" in name
            }
            assert {name: found[step][name] for name in wanted} == pytest.approx(wanted, rel=5e-5, abs=1e-9), step


@pytest.mark.proves("Lightning", "TP 2 × FSDP2 2", ranks=4)
def test_pieces_that_are_cut_twice_join_to_the_numbers_of_one_process_of_plain_torch(four):
    """Pieces that lie at one place are the same and count once: `second.bias` is held by both tensor-parallel ranks."""
    from tests.integrations.lightning.small_lightning import batches, plain_torch

    ranks, places = [recorded(four[0] / "cut", rank) for rank in range(4)], [places_of(four[0], rank) for rank in range(4)]
    for step, numbers in enumerate(plain_torch(2, None, [batches(0), batches(1)])):
        for name, value in of_parameters(numbers).items():
            if "unclipped" in name:
                continue
            parameter = name.split()[0]
            pieces = {places[rank][parameter]: ranks[rank][step][name] for rank in range(4) if parameter in places[rank]}
            assert sum(norm**2 for norm in pieces.values()) ** 0.5 == pytest.approx(value, rel=5e-5, abs=1e-9), (step, name)


def test_the_pieces_of_four_ranks_cover_each_parameter_once(four):
    found: dict[str, set[tuple[int, ...]]] = {}
    for rank in range(4):
        for name, place in places_of(four[0], rank).items():
            found.setdefault(name, set()).add(place)
    assert found == {
        "first.weight": {(0, 0, 3, 6), (3, 0, 3, 6), (6, 0, 3, 6), (9, 0, 3, 6)},
        "first.bias": {(0, 3), (3, 3), (6, 3), (9, 3)},
        "second.weight": {(0, 0, 1, 6), (0, 6, 1, 6)},
        "second.bias": {(0, 1)},
    }


def places_of(folder: Path, rank: int) -> dict[str, tuple[int, ...]]:
    """Return parameter → offset and shape of what a rank holds of it, where that is not nothing."""
    found: dict[str, tuple[int, ...]] = {}
    for call in next(steps_of(folder / "cut", rank)).calls:
        if call.kind == "state" and call.node == "before_step":
            shard = call.params["value"].extra["shard"]
            if all(shard["shape"]):
                found[call.name.removeprefix("net.")] = (*shard["offset"], *shard["shape"])
    return found


@pytest.mark.proves("Lightning", {"ddp": "DDP", "cut": "TP 2 × FSDP2 2"}, ranks=4)
@pytest.mark.parametrize("kind", ["ddp", "cut"])
def test_what_one_of_four_ranks_does_to_its_weights_is_named_on_that_rank(four, kind):
    ranks = [told[f"{kind} drifting"] for told in four[1]]
    assert ranks[3][0][:3] == ["untouched_between_steps", 2, "net.first.weight"]
    if kind == "ddp":
        assert all(told[0][:3] == ["replicas", 2, "net.first.weight"] and "ranks 3" in told[0][3] for told in ranks[:3])
    else:
        assert ranks[:3] == [[], [], []], "nobody else holds that piece"
