"""What needs processes of its own: an error in the training, and two ranks under msrun."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import orjson

from tests.mindspore.launch import msrun, run


def test_an_error_of_the_training_is_the_trainings_own(tmp_path: Path) -> None:
    """MindSpore raises it later, wherever something waits: it must not be taken for a fault of the tool."""
    bare = run("run_failing", "bare", cwd=tmp_path)
    told = run("run_failing", str(tmp_path / "out"), cwd=tmp_path)
    assert "CumsumExt" in told["error"]
    assert told == {"error": bare["error"], "restored": True, "closed": True, "findings": []}
    dump = json.loads((tmp_path / "out/step1/rank0/dump.json").read_text())
    assert dump["trainprobe"]["complete"] is False
    assert "Cell.head.Dense.forward.0" in dump["data"]  # what was collected before the error


def free_port() -> int:
    """Return a port that nobody holds, below those that the system hands out by itself."""
    first = 20000 + os.getpid() % 10000
    for port in range(first, first + 1000):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError(f"no free port from {first} on")


def told_by(logs: list[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return name of the training → rank → what was printed."""
    rows = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"rank"')]
    return {name: {row["rank"]: row for row in rows if row["name"] == name} for name in ("bare", "on", "broken")}


def test_two_ranks_know_their_place_change_no_bit_and_find_a_nan_where_it_is(tmp_path: Path) -> None:
    told = told_by(msrun("run_two_ranks", str(tmp_path), workers=2, port=free_port(), cwd=tmp_path))
    bare, on, broken = told["bare"], told["on"], told["broken"]
    assert set(bare) == set(on) == set(broken) == {0, 1}
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
