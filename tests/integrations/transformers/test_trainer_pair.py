"""The Hugging Face Trainer on two ranks (DDP over gloo): real processes, one pair for all that is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch


@pytest.fixture(scope="module")
def pair(require, tmp_path_factory) -> tuple[Path, list[dict]]:
    require("transformers")
    require("accelerate")
    folder = tmp_path_factory.mktemp("pair")
    launch(str(Path(__file__).with_name("train_pair.py")), 2, str(folder), folder=folder, timeout=240)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("run", ["out", "mix"])
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(pair, run):
    assert [told[f"{run} different bits"] for told in pair[1]] == [[], []]


def test_numbers_are_those_of_one_process_of_plain_torch(pair):
    from tests.integrations.transformers.small_trainer import CLIP, plain_torch, recorded

    ranks = [recorded(pair[0] / "out", rank) for rank in range(2)]
    for step, numbers in enumerate(plain_torch(2, CLIP, ranks=2), 1):
        shared = {name: value for name, value in numbers.items() if name != "loss"}
        for found in ranks:
            assert {name: found[step][name] for name in shared} == pytest.approx(shared, rel=1e-4, abs=1e-9), step
        assert sum(found[step]["loss"] for found in ranks) / 2 == pytest.approx(numbers["loss"], rel=1e-5)


def test_a_nan_of_one_rank_is_found_with_its_rank_and_the_parameters_name(pair):
    ranks = [told["first not finite"] for told in pair[1]]
    assert ranks[1] == [3, 1, "second.weight"]
    assert ranks[0][:2] == [3, 0], "the other rank has it through the reduced gradient"


def test_all_ranks_stop_at_the_step_at_which_one_of_them_found_something(pair):
    assert [told["stopped at"] for told in pair[1]] == [2, 2]
