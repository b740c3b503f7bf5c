"""MindFormers' two trainers with the callback, given to the constructor and named in the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.distributed.launch import free_port
from tests.mindspore.all_outputs import assert_all_outputs, plan_file
from tests.mindspore.launch import msrun, run


def written(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (folder / f"rank{rank}/records.jsonl").open("rb")]


def slots(row: dict[str, Any]) -> set[str]:
    return {slot for call in row["calls"] if call["kind"] == "state" for slot in call["params"]["d"]}


def check_scalars(rows: list[dict[str, Any]], reports: list[list[float]]) -> None:
    names = ("loss", "step_skipped", "loss_scale", "lr", "grad_norm")
    assert [[row["scalars"][name] for name in names] for row in rows] == reports


@pytest.mark.proves("MindFormers", "the classic trainer in graph mode")
def test_the_classic_trainer_in_graph_mode(tmp_path: Path) -> None:
    told = run("run_classic_trainer", str(tmp_path), "graph", cwd=tmp_path)
    assert told["equal"] is True
    assert told["numbers"] == [1, 2, 3]
    assert told["quiet"] == []
    assert told["axes"] == {"dp": [0, 2], "tp": [1, 2], "pp": [1, 2]}  # of rank 5 of 8, by a configuration of MindFormers
    given, listed = written(tmp_path / "given"), written(tmp_path / "listed")
    for rows in (given, listed):
        assert [row["step"] for row in rows] == [1, 2, 3]
        check_scalars(rows, told["reports"])
        held = {"value", "exp_avg", "exp_avg_sq", "step"}
        assert slots(rows[0]) == held | {f"{slot}_after" for slot in held}
    assert len({call["name"] for call in given[0]["calls"]}) == 21
    assert given[0]["partials"] == listed[0]["partials"]


@pytest.mark.proves("MindFormers", "the classic trainer in PyNative mode", ranks=2)
def test_the_classic_trainer_in_pynative_mode_on_two_ranks(tmp_path: Path) -> None:
    logs = msrun("run_classic_trainer", str(tmp_path), "pynative", workers=2, port=free_port(), cwd=tmp_path)
    ranks = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"equal"')]
    assert len({told["held"] for told in ranks}) == 1
    for rank, told in enumerate(ranks):
        assert told["equal"] is True
        assert told["quiet"] == []
        rows = written(tmp_path / "given", rank)
        assert [row["step"] for row in rows] == [1, 2]
        assert rows[0]["place"]["axes"] == {"dp": [rank, 2]}
        check_scalars(rows, told["reports"])
        for row in rows:
            names = {call["name"] for call in row["calls"] if call["kind"] == "module"}
            assert {"root", "model.layers.0.attention.wq", "lm_head"} <= names
            assert gradient_norm(row) == pytest.approx(1.0, rel=1e-5)  # averaged and clipped, as the optimizer gets them
            assert row["scalars"]["grad_norm"] > 1.2  # what the trainer reports is the norm before
            assert gradient_norm(row, "grad_unclipped") == pytest.approx(row["scalars"]["grad_norm"], rel=1e-5)


def gradient_norm(row: dict[str, Any], slot: str = "grad") -> float:
    """The norm over all gradients, as the optimizer was given them or before clipping, from the partials of their squares."""
    found = [call["params"]["d"][slot] for call in row["calls"] if slot in (call.get("params") or {}).get("d", {})]
    assert len(found) == 12
    squares = [row["partials"]["sumsq"][row["row"][value]] for value in found]
    return float(np.sqrt(np.sum(squares)))


@pytest.mark.proves("MindFormers", "the PyNative trainer", "all four outputs of one plan")
def test_the_pynative_trainer_and_a_step_that_it_skips(tmp_path: Path) -> None:
    plan_file(tmp_path, dumped=2)
    told = run("run_pynative_trainer", str(tmp_path), cwd=tmp_path)
    found = ("untouched_between_steps", 4, "up.weight")
    assert_all_outputs(tmp_path, dumped=2, steps=[1, 2, 3, 4], cell="up", found=found)
    assert told["equal"] == [True, True]
    assert told["quiet"] == []
    assert told["restored"] == "mindspore.nn.cell"
    for name in ("given", "listed", "unedited"):
        rows = written(tmp_path / name)
        assert [[row["step"], row["scalars"]["loss"], row["scalars"]["grad_norm"]] for row in rows] == told["reports"]
        assert [row["scalars"]["step_skipped"] for row in rows] == [0.0] * 4
        assert "grad" in slots(rows[0])
    for name in ("given", "listed"):
        dump = json.loads((tmp_path / name / "step2/rank0/dump.json").read_text())
        assert {"Cell.up.Dense.forward.0", "Cell.up.Dense.backward.0"} <= set(dump["data"])
    broken = written(tmp_path / "broken")
    assert [row["scalars"]["step_skipped"] for row in broken] == [0.0, 1.0, 0.0, 0.0]
    assert ["grad" in slots(row) for row in broken] == [True, False, True, True]
    assert told["broken"][1][2] is None
    assert told["findings"][0][:2] == ["nonfinite", 2]
    assert [finding[:3] for finding in told["lost"]] == [["ownership", 1, "down.weight"]]
