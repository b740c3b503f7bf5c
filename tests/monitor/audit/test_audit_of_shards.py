"""The audit on FSDP2 shards, on two and four real ranks: silent where training is healthy, and right about planted faults."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.matrices import all_cases
from tests.monitor.audit.train_shards import FAULTY, FLIPPED

SCRIPT = Path(__file__).with_name("train_shards.py")
BETWEEN_COPIES = ("healthy", "hybrid", "copy", "moment_copy", "decay_copy")  # on four ranks, two hold each piece
FAULTS = (*BETWEEN_COPIES, "drift", "data", "norm", "moments", "same_pieces", "nan")
TWO_OR_FOUR = [2, pytest.param(4, marks=pytest.mark.exhaustive)]
pytestmark = pytest.mark.slow


@functools.cache
def found(ranks: int) -> dict[str, list[list]]:
    """Train with each fault in turn; return fault → what each rank found: [rule, step, name, message]."""
    folder = Path(tempfile.mkdtemp(prefix="trainprobe_fsdp2_"))
    faults = FAULTS if ranks == 2 or all_cases() else BETWEEN_COPIES
    launch(SCRIPT, ranks, str(folder), *faults, timeout=300)
    return {fault: [json.loads((folder / f"{fault}.{rank}.json").read_text()) for rank in range(ranks)] for fault in faults}


@pytest.mark.parametrize("layout", ["healthy", "hybrid"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_healthy_training_on_shards_raises_no_alarm(ranks, layout):
    assert found(ranks)[layout] == [[]] * ranks


@pytest.mark.parametrize("ranks", TWO_OR_FOUR)
def test_a_shard_that_is_written_to_between_two_updates_is_named_on_its_rank(ranks):
    told = [[finding[:3] for finding in rank] for rank in found(ranks)["drift"]]
    assert told[1][:1] == [["untouched_between_steps", 2, "layers.1.mlp.down.weight"]]
    assert told[0] == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("fault", "slot"), [("copy", "value"), ("moment_copy", "exp_avg")])
def test_a_bit_that_flips_in_one_copy_of_a_piece_is_found_on_all_ranks_that_hold_it(ranks, fault, slot):
    """Hybrid sharding: of four ranks, 0 and 2 hold one half of each tensor, 1 and 3 the other."""
    holders = range(ranks)[(ranks - 1) % 2 :: 2] if ranks > 2 else range(ranks)
    for rank, told in enumerate(found(ranks)[fault]):
        about = [(step, name, message) for rule, step, name, message in told if rule == "replicas"]
        assert bool(about) == (rank in holders)
        for step, name, message in about[:1]:
            assert (step, name) == (2, FLIPPED)
            assert f"dp group of ranks {', '.join(map(str, holders))}: {FLIPPED}, ranks" in message
            assert ("the weights differ" if slot == "value" else "the optimizer state exp_avg differs") in message


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_of_a_piece_that_come_apart_in_an_update_are_found_in_that_update_on_all_ranks_that_hold_them(ranks):
    holders = range(ranks)[(ranks - 1) % 2 :: 2] if ranks > 2 else range(ranks)
    for rank, told in enumerate(found(ranks)["decay_copy"]):
        about = [(step, message) for rule, step, _, message in told if rule == "updated_replicas"]
        assert bool(about) == (rank in holders)
        for step, message in about:
            assert step == FAULTY and told[0][0] == "updated_replicas"
            assert f"after the update in the dp group of ranks {', '.join(map(str, holders))}" in message


@pytest.mark.parametrize("ranks", TWO_OR_FOUR)
@pytest.mark.parametrize(
    ("fault", "rule"), [("data", "distinct_data"), ("norm", "gradient_norm"), ("moments", "moments_present")]
)
def test_every_rank_finds_what_is_wrong_on_all_of_them_at_once(ranks, fault, rule):
    for told in found(ranks)[fault]:
        assert told[0][:2] == [rule, 2], told


@pytest.mark.parametrize("ranks", TWO_OR_FOUR)
def test_pieces_that_begin_alike_on_all_ranks_are_named_on_each(ranks):
    for told in found(ranks)["same_pieces"]:
        assert [finding[:3] for finding in told] == [["distinct_pieces", 0, FLIPPED]], told
        assert f"ranks {', '.join(map(str, range(ranks)))} hold different pieces of {FLIPPED}" in told[0][3]


def test_pieces_of_nan_are_not_equal_pieces():
    for told in found(2)["nan"]:
        assert "distinct_pieces" not in {rule for rule, *_ in told}, told
