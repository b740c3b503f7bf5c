"""Runs of two ranks that went back to an earlier checkpoint: each step is counted once, and ranks are read side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from trainprobe import Probe
from trainprobe.cli import main
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.monitor.nan_trace.steps import steps_of


def train(
    folder: Path, rank: int, steps: Iterable[int], bad: Iterable[int] = (), world: int = 2, spoilt: int = -1, **fields: Any
) -> None:
    """Train two layers, of which the optimizer holds the first. bad: steps whose batch has a NaN; spoilt: whose gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    plan = {"output": folder, "level": "off", "monitor": True, "on_existing": "continue", "console": False, **fields}
    probe = Probe(plan, place=Place(rank, world, {"dp": (rank, world)}))
    probe.open(model, [optimizer])
    for step in steps:
        with probe.step(step):
            optimizer.zero_grad()
            x = torch.randn(3, 4)
            if step in bad:
                x[0, 0] = float("nan")
            model(x).square().mean().backward()
            if step == spoilt:
                model[1].weight.grad[0, 0] = float("nan")  # pyright: ignore[reportOptionalSubscript]
            if step not in bad:
                optimizer.step()
            if rank == world - 1:
                probe.note("loss", 7.25)
    probe.close()


def told(capsys: Any, *command: Any) -> dict[str, Any]:
    """The JSON that a command prints."""
    capsys.readouterr()
    main([*map(str, command), "--json"])
    return orjson.loads(capsys.readouterr().out)


def went_back(folder: Path, sinks: Any) -> None:
    """Rank 1 ends before rank 0 does; both go on from step 8, and rank 0 meets a NaN at step 9."""
    train(folder, 0, range(12), sinks=sinks)
    train(folder, 1, range(10), sinks=sinks)
    for rank in range(2):
        train(folder, rank, range(8, 14), bad=[9] if rank == 0 else [10], sinks=sinks)


@pytest.mark.parametrize("sinks", [["parquet"], ["jsonl"]])
def test_nan_trace_reads_ranks_side_by_side_after_one_ended_early(sinks, tmp_path, capsys):
    went_back(tmp_path, sinks)
    steps = [(ranks[0].frame.step, [here.rank for here in ranks]) for ranks in steps_of(tmp_path)]
    assert steps == [
        *[(step, [0, 1]) for step in range(10)],
        *[(step, [0]) for step in (10, 11)],
        *[(step, [0, 1]) for step in range(8, 14)],
    ]
    found = told(capsys, "nan-trace", tmp_path)
    assert [(trace["rank"], trace["step"]) for trace in found["ranks"]] == [(0, 9), (1, 10)]


@pytest.mark.parametrize("sinks", [["parquet"], ["jsonl"]])
def test_runs_counts_each_step_of_all_ranks_once(sinks, tmp_path, capsys):
    went_back(tmp_path, sinks)
    found = told(capsys, "runs", tmp_path)
    assert [found[name] for name in ("ranks", "world_size", "steps", "fewest_steps")] == [2, 2, 14, 14]
    assert (found["first_step"], found["last_step"]) == (0, 13)


def test_runs_names_ranks_that_are_not_there_and_the_steps_of_the_shortest(tmp_path, capsys):
    train(tmp_path, 0, range(3), world=4)
    train(tmp_path, 2, range(8), world=4)
    found = told(capsys, "runs", tmp_path)
    assert [found[name] for name in ("ranks", "world_size", "steps", "fewest_steps", "last_step")] == [2, 4, 8, 3, 7]
    main(["runs", str(tmp_path)])
    assert "2 of 4  3 to 8 (0 to 7)" in " ".join(capsys.readouterr().out.replace("  ", " ").split()).replace("4 3", "4  3")


def test_runs_counts_one_finding_a_cause(tmp_path, capsys):
    for rank in range(2):
        train(tmp_path, rank, range(8), bad=[5])
    assert len(read_findings(tmp_path)) == 2
    assert told(capsys, "runs", tmp_path)["findings"] == {"error": 1}


@pytest.mark.parametrize("who", [0, 1])
def test_what_only_the_log_knows_is_not_hidden_by_a_dump_of_another_rank_or_of_another_layer(who, tmp_path, capsys):
    part = {"level": "L0", "step": [5], "modules": ["0"], "sinks": ["dump", "parquet"]}
    train(tmp_path, 0, range(8), spoilt=5 if who == 0 else -1, sinks=["parquet"])
    train(tmp_path, 1, range(8), spoilt=5 if who == 1 else -1, **part)
    first = told(capsys, "nan-trace", tmp_path)["first"]
    assert (first["rank"], first["step"], first["at"]["name"], first["origin"]) == (who, 5, "1.weight", "made")


def test_the_page_and_top_show_what_the_rules_find_beside_what_the_run_recorded(tmp_path, capsys):
    """The run knew one rule; its log shows a parameter too that no optimizer holds."""
    train(tmp_path, 0, range(30), bad=[20], world=1, monitor={"rules": ["nonfinite"]})
    assert {finding.rule for finding in read_findings(tmp_path)} == {"nonfinite"}
    main(["report", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    capsys.readouterr()
    main(["top", "--once", str(tmp_path)])
    for text in (page, capsys.readouterr().out):
        assert "did not change over 10 collected steps" in " ".join(text.replace("│", " ").split())
        assert "the first NaN of step 20" in " ".join(text.replace("│", " ").split())


def test_nan_trace_of_finite_steps_names_the_ranks_that_are_not_there(tmp_path, capsys):
    train(tmp_path, 0, range(3), world=4)
    train(tmp_path, 2, range(8), world=4)
    main(["nan-trace", str(tmp_path)])
    said = capsys.readouterr().out
    assert "Of ranks 1, 3 nothing is there." in said
    assert "Rank 0 had fewer steps: 3." in said
    assert told(capsys, "nan-trace", tmp_path)["not_seen"] == ["Of ranks 1, 3 nothing is there.", "Rank 0 had fewer steps: 3."]


def test_top_shows_a_loss_that_the_last_rank_alone_knows(tmp_path, capsys):
    for rank in range(2):
        train(tmp_path, rank, range(3))
    capsys.readouterr()
    main(["top", "--once", str(tmp_path)])
    assert "7.25" in capsys.readouterr().out
