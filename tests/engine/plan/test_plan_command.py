"""`trainprobe plan` checks, explains and exports, and the documents that it writes are current."""

from __future__ import annotations

import io
import json
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import yaml

from trainprobe.cli import main
from trainprobe.engine.plan.command import explain_text, schema_text, sentences
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.new_plan import SCHEMA

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PINNED = f"pydantic=={version('pydantic')}" in (ROOT / "requirements/core.txt").read_text().splitlines()


def test_the_explanation_in_docs_is_current() -> None:
    assert (DOCS / "plan.md").read_text(encoding="utf-8") == explain_text(), "run `trainprobe plan --explain -o docs/plan.md`"


@pytest.mark.skipif(not PINNED, reason="other releases of pydantic write the same schema in other words")
def test_the_schema_in_docs_is_current() -> None:
    text = (DOCS / "plan.schema.json").read_text(encoding="utf-8")
    assert text == schema_text(), "run `trainprobe plan --schema -o docs/plan.schema.json`"
    assert text == SCHEMA.read_text(encoding="utf-8"), f"copy it to {SCHEMA}"


def test_the_schema_lists_every_field_and_forbids_others() -> None:
    schema = json.loads(schema_text())
    assert list(schema["properties"]) == list(Plan.model_fields)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("field", ["step", "modules", "statistics", "slice", "details", "sinks", "quantiles"])
def test_the_schema_accepts_one_value_where_a_list_may_stand(field: str) -> None:
    kinds = json.loads(schema_text())["properties"][field]["anyOf"]
    assert any(kind.get("type") == "array" for kind in kinds)
    assert any(kind.get("type") != "array" for kind in kinds)


def test_a_good_file_gives_0_and_says_what_it_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("level: mix\nstep: [10, 100-110]\nmodules: layers.**\nmax_bytes: 1 GiB\n")
    assert main(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    for part in ("every module and op, only modules layers.**", "step 10, 100-110, on every rank", "1,073,741,824", "step 110"):
        assert part in out


def test_a_bad_file_gives_3_and_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("levle: mix\n")
    assert main(["plan", str(path)]) == 3
    assert capsys.readouterr().err == f"trainprobe: {path}: unknown key 'levle' — did you mean 'level'?\n"


def test_notes_about_a_foreign_file_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"dump_path": "x", "seed": 1}')
    assert main(["plan", str(path)]) == 0
    assert "! " in capsys.readouterr().out


def test_explain_prints_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain"]) == 0
    out = capsys.readouterr().out
    assert [name for name in Plan.model_fields if f"- **{name}**" not in out] == []


def test_schema_is_written_to_a_file(tmp_path: Path) -> None:
    assert main(["plan", "--schema", "-o", str(tmp_path / "s.json")]) == 0
    assert (tmp_path / "s.json").read_text(encoding="utf-8") == schema_text()


def test_a_file_that_cannot_be_written_gives_3_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "-o", str(tmp_path)]) == 3
    assert capsys.readouterr().err == f"trainprobe: --output {tmp_path} cannot be written: Is a directory\n"


def test_level_off_is_said_to_record_nothing() -> None:
    assert list(sentences(load_plan(level="off"))) == ["record nothing, because record is nothing"]
    watched = list(sentences(load_plan(level="off", monitor=True, audit=True)))
    assert watched[0] == "dump nothing, because record is nothing; of each step record what the monitor and the audit ask for"
    assert watched[1].startswith("write parquet to ")
    assert watched[2:] == ["run the monitor", "run the audit"]


@pytest.mark.parametrize(
    ("answers", "fields"),
    [
        (
            ["", "", ""],
            {"record": "nothing", "sinks": ("parquet",), "monitor": True, "audit": True, "output": Path("probe_out")},
        ),
        (
            ["judge", "wandb", "out"],
            {"record": "nothing", "sinks": ("parquet", "wandb"), "monitor": True, "output": Path("out")},
        ),
        (["2", "3, 10-12", "d"], {"record": "L0", "step": (3, "10-12"), "monitor": None, "sinks": ("dump", "parquet")}),
        (["both", "0", "d"], {"record": "L0", "step": (0,), "monitor": True, "audit": True}),
    ],
)
def test_three_questions_make_a_plan_that_an_editor_completes(tmp_path, monkeypatch, capsys, answers, fields) -> None:
    file = tmp_path / "plan.yaml"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*answers, ""])))
    assert main(["plan", "--new", str(file)]) == 0
    plan = load_plan(file)
    assert {name: getattr(plan, name) for name in fields} == fields
    first, *lines = file.read_text().splitlines()
    assert first == f"# yaml-language-server: $schema={SCHEMA}"
    jsonschema.validate(yaml.safe_load(file.read_text()), json.loads(SCHEMA.read_text()))
    for name in yaml.safe_load(file.read_text()):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{name}: "))
        assert lines[at - 1].startswith("#"), f"{name} has no comment"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*answers, ""])))
    assert main(["plan", "--new", str(file)]) == 3, "nothing is overwritten"


@pytest.mark.parametrize("answers", [["4", "", ""], ["judge", "wandbb", "x"], ["dump", "ten", "x"]])
def test_an_answer_that_no_plan_can_have_writes_nothing(tmp_path, monkeypatch, capsys, answers) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*answers, ""])))
    assert main(["plan", "--new", str(tmp_path / "plan.yaml")]) == 3
    assert not (tmp_path / "plan.yaml").exists() and capsys.readouterr().err.startswith("trainprobe: ")
