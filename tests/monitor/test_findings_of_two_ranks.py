"""What two ranks find: printed once, one entry a cause in judge, top and the page, and every written line fits the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from trainprobe.cli import main
from trainprobe.engine.core.findings import schema

SCRIPT = Path(__file__).with_name("train_two_ranks.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, list[list[str]]]:
    """Return the folder of a run and, for each rank, the lines that trainprobe printed."""
    folder = tmp_path_factory.mktemp("two") / "run"
    printed = launch(SCRIPT, 2, str(folder))
    return folder, [[line for line in text.splitlines() if line.startswith("trainprobe: ")] for text in printed]


@pytest.fixture(scope="module")
def run(ran) -> Path:
    return ran[0]


@pytest.fixture(scope="module")
def said(ran) -> list[list[str]]:
    return ran[1]


def test_each_rank_records_what_it_finds(run):
    for rank in range(2):
        lines = (run / f"rank{rank}" / "findings.jsonl").read_text().splitlines()
        assert {json.loads(line)["rule"] for line in lines} == {"replicas", "nonfinite"}


def test_what_both_find_is_printed_by_one(said):
    both = [line for lines in said for line in lines]
    assert sum("error replicas (step 0, rank " in line for line in both) == 1
    assert sum("error nonfinite (step 7, rank 1): the first NaN of step 7 is in module" in line for line in said[1]) == 1


def test_rank_0_alone_ends_the_run_with_the_findings_of_all(said):
    (end,) = [line for lines in said for line in lines if " watched, " in line]
    assert end in said[0]
    assert end.startswith("trainprobe: 9 steps watched, ") and "(replicas" in end and "nonfinite" in end
    assert "first at step 0" in end


def test_judge_joins_the_ranks_and_begins_with_the_cause(run, capsys):
    assert main(["judge", str(run), "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    errors = [(f["rule"], f["step"], f["ranks"], f["origin"]) for f in told if f["severity"] == "error"]
    assert errors[0] == ("replicas", 0, [0, 1], "recorded")
    assert ("nonfinite", 7, [0, 1], "both") in errors  # born on rank 1; rank 0 has it from the exchange of gradients
    assert len(errors) == len({rule for rule, *_ in errors}) == 2


def test_top_and_the_page_have_one_entry_a_cause(run, tmp_path, capsys):
    assert main(["top", str(run), "--once"]) == 0
    out = capsys.readouterr().out
    assert out.count("replicas (") == 1 and out.index("replicas (") < out.index("nonfinite (")
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('"rule":"replicas"') == 1 and page.count('"rule":"nonfinite"') == 1


def test_every_written_finding_fits_the_published_schema(run, require):
    validator = require("jsonschema").Draft202012Validator(schema())
    lines = [line for file in run.rglob("findings.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) > 4
    for line in lines:
        validator.validate(json.loads(line))
