"""What needs processes of its own: an error in the training, and two ranks under msrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.distributed.launch import free_port
from tests.mindspore.launch import msrun, run


def test_an_error_of_the_training_is_the_trainings_own(tmp_path: Path) -> None:
    """MindSpore raises it later, wherever something waits: it must not be taken for a fault of the tool."""
    bare = run("run_failing", "bare", cwd=tmp_path)
    told = run("run_failing", str(tmp_path / "out"), cwd=tmp_path)
    assert "CumsumExt" in told["error"]
    assert told.pop("end").startswith("trainprobe: 1 step, 0 of them watched, 1 cut short, no step judged as a whole;")
    assert told == {"error": bare["error"], "restored": True, "closed": True, "findings": []}
    dump = json.loads((tmp_path / "out/step1/rank0/dump.json").read_text())
    assert dump["trainprobe"]["complete"] is False
    assert "Cell.head.Dense.forward.0" in dump["data"]  # what was collected before the error


def told_by(logs: list[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return name of the training → rank → what was printed."""
    rows = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"rank"')]
    names = dict.fromkeys(row["name"] for row in rows)
    return {name: {row["rank"]: row for row in rows if row["name"] == name} for name in names}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[int, dict[str, Any]]]]:
    """Run all trainings of `run_two_ranks` once."""
    folder = tmp_path_factory.mktemp("two_ranks")
    told = told_by(msrun("run_two_ranks", str(folder), workers=2, port=free_port(), cwd=folder))
    assert list(told) == ["bare", "on", "broken", "written", "rate", "data", "unreduced", "tensor", "other tokens"]
    assert all(set(rows) == {0, 1} for rows in told.values())
    return folder, told


@pytest.mark.proves("MindSpore", "data parallel under msrun", ranks=2)
def test_two_ranks_know_their_place_change_no_bit_and_find_a_nan_where_it_is(two_ranks: Any) -> None:
    tmp_path, told = two_ranks
    bare, on, broken = told["bare"], told["on"], told["broken"]
    assert {rank: row["bits"] for rank, row in on.items()} == {rank: row["bits"] for rank, row in bare.items()}
    assert bare[0]["bits"] == bare[1]["bits"]
    rows = [[orjson.loads(line) for line in (tmp_path / f"on/rank{r}/records.jsonl").open("rb")] for r in (0, 1)]
    places = [{"rank": r, "world_size": 2, "axes": {"dp": [r, 2]}} for r in (0, 1)]
    assert [row["place"] for row in (rows[0][0], rows[1][0])] == places
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4]
    assert rows[0][0]["scalars"]["loss"] != rows[1][0]["scalars"]["loss"]
    first = {rank: next(f for f in row["findings"] if f[0] == "nonfinite") for rank, row in broken.items()}
    assert [first[1][1], first[1][2]] == [3, 1]
    assert "blocks.1.up" in first[1][3]
    assert first[0][1] == 3  # the averaged gradients brought it to the other rank within the step
    assert "grad" in first[0][3]


# what is planted on rank 1 → what each rank finds first: relation, step, name, and words of the message
PLANTED = {
    "written": (("replicas", 3, "blocks.1.up.bias", "overwritten"), ("untouched_between_steps", 3, "blocks.1.up.bias", "")),
    "rate": (("shared_scalars", 1, "lr", "0.0199999996 on rank 1"),) * 2,
    "data": (("distinct_data", 1, "batch", "ranks 0, 1 train on the same data"),) * 2,
    "unreduced": (("replicas", 1, "head.bias", "reduction over this group is missing"),) * 2,
    "other tokens": (("distinct_data", 1, "batch", "the tp group of ranks 0, 1 trains on different tokens"),) * 2,
}


@pytest.mark.proves("MindSpore", "the audit", ranks=2)
def test_healthy_replicas_are_quiet_under_every_relation(two_ranks: Any) -> None:
    for name in ("on", "tensor"):
        assert [row["findings"] for row in two_ranks[1][name].values()] == [[], []]


def test_axes_that_are_told_are_in_the_records(two_ranks: Any) -> None:
    rows = [orjson.loads((two_ranks[0] / f"tensor/rank{r}/records.jsonl").open("rb").readline()) for r in (0, 1)]
    assert [row["place"]["axes"] for row in rows] == [{"tp": [0, 2]}, {"tp": [1, 2]}]


@pytest.mark.parametrize("planted", PLANTED)
def test_what_sets_one_rank_apart_is_named_on_both(planted: str, two_ranks: Any) -> None:
    for rank, (rule, step, name, words) in enumerate(PLANTED[planted]):
        first = two_ranks[1][planted][rank]["findings"][0]
        assert [first[0], first[1], first[2], first[4]] == [rule, step, rank, name]
        assert words in first[3]
    apart = [f for f in two_ranks[1][planted][0]["findings"] if f[0] in ("replicas", "updated_replicas")]
    assert all("in the dp group of ranks 0, 1" in f[3] for f in apart)
