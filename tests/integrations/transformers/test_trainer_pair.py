"""The Hugging Face Trainer on two and four ranks (DDP over gloo): real processes, one launch for all that is asked of each."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch

RUNS = {2: ("out", "mix", "audit", "sick", "stop"), 4: ("out", "sick")}
ranks_of_both = pytest.mark.parametrize("ranks", RUNS)


@pytest.fixture(scope="module")
def trained(require, tmp_path_factory):
    """Return a function of the number of ranks that returns the folder and what each rank told."""
    require("transformers")
    require("accelerate")

    @functools.cache
    def train(ranks: int) -> tuple[Path, list[dict]]:
        folder = tmp_path_factory.mktemp("trained")
        launch(Path(__file__).with_name("train_pair.py"), ranks, str(folder), *RUNS[ranks], timeout=400)
        return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return train


@pytest.mark.proves("Hugging Face Trainer", "DDP", ranks=(2, 4))
@pytest.mark.parametrize(("ranks", "run"), [(2, "out"), (2, "mix"), (2, "audit"), (4, "out")])
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(trained, ranks, run):
    assert [told[f"{run} different bits"] for told in trained(ranks)[1]] == [[]] * ranks


@pytest.mark.proves("Hugging Face Trainer", "DDP", ranks=(2, 4))
@ranks_of_both
def test_numbers_are_those_of_one_process_of_plain_torch(trained, ranks):
    from tests.integrations.transformers.small_trainer import CLIP, plain_torch, recorded

    found = [recorded(trained(ranks)[0] / "out", rank) for rank in range(ranks)]
    for step, numbers in enumerate(plain_torch(2, CLIP, ranks=ranks), 1):
        shared = {name: value for name, value in numbers.items() if name != "loss"}
        for own in found:
            assert {name: own[step][name] for name in shared} == pytest.approx(shared, rel=1e-4, abs=1e-9), step
        assert sum(own[step]["loss"] for own in found) / ranks == pytest.approx(numbers["loss"], rel=1e-5)


def test_the_audit_finds_nothing_in_a_healthy_training(trained):
    assert [told["audit found"] for told in trained(2)[1]] == [[], []]


@pytest.mark.proves("Hugging Face Trainer", "DDP", ranks=(2, 4))
@ranks_of_both
def test_a_nan_of_one_rank_is_found_with_its_rank_and_the_parameters_name(trained, ranks):
    found = [told["first not finite"] for told in trained(ranks)[1]]
    assert found[-1] == [3, ranks - 1, "second.weight"]
    assert [first[:2] for first in found[:-1]] == [[3, rank] for rank in range(ranks - 1)], (
        "the others have it through the reduced gradient"
    )


def test_all_ranks_stop_at_the_step_at_which_one_of_them_found_something(trained):
    assert [told["stopped at"] for told in trained(2)[1]] == [2, 2]
