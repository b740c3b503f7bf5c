"""DeepSpeed's mixture of experts: four experts over two ranks, and over four, where each expert has a replica."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.deepspeed.small_deepspeed import STATE
from tests.integrations.deepspeed.small_moe import EXPERTS, PATH, clip_of, plain_moe
from tests.integrations.records import recorded

DRAWN = "zero1-fp32-drawn"
TWO, FOUR = ("zero0-fp32", "zero2-fp32", "zero1-bf16", DRAWN), ("zero0-fp32", "zero1-fp32", "zero2-bf16")
LAYOUTS = [*((2, name) for name in TWO), *((4, name) for name in FOUR)]
EXACT = [(ranks, name) for ranks, name in LAYOUTS if "fp32" in name]
BROKEN = f"{PATH}.3.down.weight"  # the second expert of rank 1
STAGES = ("zero0-fp32", "zero1-fp32")
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.fixture(scope="module")
def folder(require, tmp_path_factory) -> Path:
    require("deepspeed")
    folder = tmp_path_factory.mktemp("moe")
    script = str(Path(__file__).with_name("train_moe.py"))
    nans, drifts = [f"{name}@nan" for name in STAGES], [f"{name}@drift" for name in STAGES]
    for ranks, names in ((2, (*TWO, *nans)), (4, (*FOUR, *drifts))):
        (folder / str(ranks)).mkdir()
        launch(script, ranks, str(folder / str(ranks)), *names, folder=folder / str(ranks), timeout=400)
    return folder


def told(folder: Path, ranks: int, name: str) -> list[dict]:
    return [json.loads((folder / str(ranks) / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(folder, ranks, name):
    assert [rank["different bits"] for rank in told(folder, ranks, name)] == [[]] * ranks
    assert [rank["left"] for rank in told(folder, ranks, name)] == [[]] * ranks


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_experts_carry_the_numbers_that_they_have_over_all_ranks(folder, ranks, name):
    for rank in range(ranks):
        names = {key.split()[0] for key in recorded(folder / str(ranks) / name, rank)[1] if PATH in key}
        numbers = {int(expert.removeprefix(f"{PATH}.").split(".")[0]) for expert in names}
        assert numbers == {2 * (rank % 2), 2 * (rank % 2) + 1}


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_the_place_of_each_process_is_known(folder, ranks, name):
    for rank, found in enumerate(told(folder, ranks, name)):
        assert found["axes"] == {"dp": [rank, ranks], "ep": [rank % 2, 2]}


@pytest.mark.parametrize(("ranks", "name"), EXACT)
def test_all_experts_have_the_numbers_of_one_process_of_plain_torch(folder, ranks, name):
    seen = [recorded(folder / str(ranks) / name, rank) for rank in range(ranks)]
    stage = int(name[4])
    for step, expected in enumerate(plain_moe(ranks, clip_of(stage)), 1):
        wanted = {key: value for key, value in expected.items() if " " in key and not key.startswith("loss ")}
        assert sum(PATH in key for key in wanted) == 4 * EXPERTS * (3 + len(STATE))
        found = {key: norm_of([rank[step][key] for rank in seen if key in rank[step]], key, stage) for key in wanted}
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-8)
        for rank in range(ranks):
            assert seen[rank][step]["loss"] == pytest.approx(expected[f"loss {rank}"], rel=2e-5)
            assert seen[rank][step].get("grad_norm") == (pytest.approx(expected["grad_norm"], rel=2e-5) if stage else None)


def norm_of(pieces: list[float], key: str, stage: int) -> float:
    """Return the norm of a whole tensor from what ranks hold: each all of it, or pieces where ZeRO cuts."""
    if stage == 0 or key.endswith((" value", " value_after")):
        assert len(set(pieces)) == 1, (key, "replicas differ")
        return pieces[0]
    return sum(piece**2 for piece in pieces) ** 0.5


@pytest.mark.parametrize(("ranks", "name"), [layout for layout in LAYOUTS if layout[1] != DRAWN])
def test_a_healthy_training_raises_no_alarm(folder, ranks, name):
    assert [rank["found"] for rank in told(folder, ranks, name)] == [[]] * ranks


def test_a_router_that_draws_random_numbers_in_evaluation_is_told_of(folder):
    """As DeepSpeed's does in its default setting, `use_rts`; nothing else is found."""
    for rank, found in enumerate(told(folder, 2, DRAWN)):
        assert [finding[:4] for finding in found["found"]] == [["evaluation", 1, rank, "moe.deepspeed_moe.gate"]]


@pytest.mark.parametrize("name", STAGES)
def test_a_nan_in_one_expert_is_named_by_its_global_number_on_its_rank(folder, name):
    first, second = ([finding[:4] for finding in found["found"]] for found in told(folder, 2, f"{name}@nan"))
    assert second == [["nonfinite", 3, 1, BROKEN], ["finite_together", 3, 1, BROKEN]]
    assert first == ([["nonfinite", 3, 0, "grad_norm"]] if name != "zero0-fp32" else []), "it holds no piece of that expert"


@pytest.mark.parametrize("name", STAGES)
def test_an_expert_that_drifts_from_its_replica_is_named_on_both_ranks_that_hold_it(folder, name):
    """Under ZeRO 1 rank 3 alone steps this weight; both hold it."""
    found = [[finding[:4] for finding in rank["found"]] for rank in told(folder, 4, f"{name}@drift")]
    assert found[0] == found[2] == []
    assert found[1] == [["untouched_between_steps", 3, 1, BROKEN], ["replicas", 3, 1, BROKEN]]
    assert found[3] == [["replicas", 3, 3, BROKEN]]
