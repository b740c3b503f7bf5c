"""Functional collectives of two real ranks: recorded as those of torch.distributed are, with numbers that were waited for."""

from __future__ import annotations

import json

import pytest

from tests.distributed import train_functional
from tests.distributed.launch import launch

FORWARD = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
BACKWARD = ["all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("functional")
    launch(train_functional.__file__, 2, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_both_passes_are_recorded_with_the_numbers_that_numpy_finds(told, rank):
    found = told[rank]["dumps"]["mix"]["collectives"]
    names = [name.partition(".")[2] for name, *_ in found]
    assert names == [*FORWARD, "all_reduce", *BACKWARD]
    assert all(group == [0, 1] for _, group, *_ in found)
    assert [operation for _, _, operation, *_ in found] == [
        "RedOpType.SUM" if "reduce" in name else None for name in names
    ]  # fmt: skip
    numbers = [number for _, _, _, given, out, _ in found[:4] for number in (*given, *out)]
    assert numbers == pytest.approx(told[rank]["runs"]["mix"]["wanted"][0], rel=1e-6)


def test_a_sum_is_the_same_on_both_ranks_and_what_is_exchanged_is_kept_as_a_whole(told):
    out = [{i: each[4] for i, each in enumerate(rank["dumps"]["mix"]["collectives"])} for rank in told]
    given = [{i: each[3] for i, each in enumerate(rank["dumps"]["mix"]["collectives"])} for rank in told]
    for i in (0, 1, 6, 8):  # sums and gathered parts, in both passes
        assert out[0][i] == pytest.approx(out[1][i], rel=1e-12)
    for i in (3, 5):
        squares = [sum(numbers[i][0] ** 2 for numbers in side) for side in (given, out)]
        assert squares[0] == pytest.approx(squares[1], rel=1e-9)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_what_a_module_hands_on_before_it_is_written_has_the_numbers_that_were_waited_for(told, level):
    for rank in told:
        norm, stored, note = rank["dumps"][level]["values"]["sum"]
        assert norm == pytest.approx(rank["runs"]["mix"]["wanted"][0][1], rel=1e-6)
        assert stored == pytest.approx(norm, rel=1e-6)
        assert note is None


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_what_nobody_waits_for_is_not_waited_for_and_has_a_note(told, level):
    for rank in told:
        assert rank["runs"][level]["waited"] == rank["runs"]["off"]["waited"] == [False]
        assert rank["dumps"][level]["values"]["held"] == [None, None, "a collective still writes it"]
    assert all(rank["dumps"]["mix"]["collectives"][4][4] == [] for rank in told)


def test_no_operator_is_recorded_of_memory_that_a_collective_still_writes(told):
    for rank in told:
        assert not [name for name in rank["dumps"]["mix"]["ops"] if "c10d" in name or "wait" in name or "all_" in name]


def test_no_bit_changes_and_nothing_stays(told):
    assert all(len({run["digest"] for run in rank["runs"].values()}) == 1 for rank in told)
    assert all(run["put_back"] for rank in told for run in rank["runs"].values())
    assert all(rank["runs"]["off"]["within"] == ["OpOverloadPacket"] * 2 for rank in told)
    assert all(rank["runs"]["mix"]["within"] == ["InPlaceOfOp"] * 2 for rank in told)


def test_other_modes_of_the_program_see_what_they_see_without_the_probe(told):
    for rank in told:
        runs = rank["runs"]
        assert runs["off"]["functions"]
        assert runs["mix"]["functions"] == runs["L0"]["functions"] == runs["off"]["functions"]


def test_compiled_code_calls_the_operators_themselves(told):
    assert [rank["compiled"] for rank in told] == [[36.0] * 4] * 2  # 3 ones, times 2, of two ranks, times 3
