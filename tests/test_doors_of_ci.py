"""What a pipeline gets of an answer: exit codes in one table, JUnit files, annotations of GitHub, fixtures of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import trainprobe
from tests.exit_codes import PAGE, leaves, page
from trainprobe.cli import main
from trainprobe.comparison.ci_formats import PipelineCase, tell
from trainprobe.pytest_plugin import assert_healthy, assert_same_run

ROOT = Path(__file__).resolve().parents[1]
OF_FILES = {
    **{
        name: ["nowhere"]
        for name in ("plan", "migrate", "report", "judge", "nan-trace", "top", "black-box", "show", "op-check")
    },
    **{name: ["nowhere"] for name in ("ckpt-show", "csv2tb", "preflight", "runs")},
    **{name: ["nowhere", "nowhere"] for name in ("ckpt-compare", "dump-compare", "config-check compare", "resume-check")},
}


def test_the_page_of_exit_codes_says_what_the_commands_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.exit_codes`"


@pytest.mark.parametrize(
    "command",
    [
        name
        for name, _ in leaves()
        if name
        not in {
            "run",
            "preflight",
            "compile-check",
            "floor",
            "parity",
            "config-check collect",
            "golden record",
            "op-check classic",
        }
    ],
)
def test_an_option_that_is_none_is_misuse(command, capsys):
    assert main([*command.split(), "--no-such-option"]) == 64


@pytest.mark.parametrize("command", OF_FILES)
def test_what_is_not_there_has_no_answer(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), *OF_FILES[command]]) == 3


def train(folder: Path, nan: bool = False, **plan: object) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trainprobe.watch(model, optimizer, output=folder, console=False, **plan) as probe:  # type: ignore[arg-type]
        for step in range(3):
            with probe.step():
                loss = model(torch.randn(6, 4)).square().mean() * (float("nan") if nan and step == 1 else 1.0)
                probe.note("loss", loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return folder


def read(file: Path) -> list[tuple[str, str | None]]:
    """Return what each case of a JUnit file is, with its message."""
    suites = ElementTree.parse(file).getroot()
    (suite,) = suites
    cases = [(child.tag, child.get("message")) for case in suite for child in case]
    assert suite.get("tests") == str(len(cases))
    assert [suite.get(kind) for kind in ("failures", "errors")] == [
        str(sum(tag == kind for tag, _ in cases)) for kind in ("failure", "error")
    ]
    return cases


def test_each_command_tells_a_pipeline_what_it_found(tmp_path, capsys):
    healthy, broken = train(tmp_path / "healthy", record="L1", monitor=True), train(tmp_path / "broken", nan=True, monitor=True)
    file = tmp_path / "answer.xml"

    def told(*words: object) -> tuple[int, list[tuple[str, str | None]], str]:
        code = main([*map(str, words), "--junit", str(file), "--github"])
        return code, read(file), capsys.readouterr().err

    code, cases, notes = told("judge", healthy)
    assert (code, [tag for tag, _ in cases]) == (0, ["system-out"]) and notes.startswith("::notice title=trainprobe judge%3A ")
    code, cases, notes = told("judge", broken, "--json")
    assert code == 1 and ("failure" in {tag for tag, _ in cases}) and "is in" in str(cases) and "::error title=" in notes
    code, cases, _ = told("dump-compare", healthy / "step0", healthy / "step0")
    assert (code, [tag for tag, _ in cases]) == (0, ["system-out"])
    code, cases, notes = told("dump-compare", healthy / "step0", healthy / "step1")
    assert code >= 2 and cases[0][0] != "system-out" and "::error" in notes
    code, cases, _ = told("op-check", healthy / "step0")
    assert (code, [tag for tag, _ in cases]) == (0, ["system-out"])
    for name, value in (("a", 1.0), ("b", 2.0)):
        torch.save({"weight": torch.full((4, 4), value)}, tmp_path / f"{name}.pt")
    code, cases, notes = told("ckpt-compare", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (code, [tag for tag, _ in cases]) == (2, ["failure"]) and "::error" in notes
    for name, rate in (("a", 0.1), ("b", 0.2)):
        settings = tmp_path / f"{name}.yaml"
        settings.write_text(f"learning_rate: {rate}\n")
        assert main(["config-check", "collect", "--scripts", str(settings), "-o", str(tmp_path / f"{name}.zip")]) == 0
    code, cases, notes = told("config-check", "compare", tmp_path / "a.zip", tmp_path / "b.zip")
    assert code and [tag for tag, _ in cases] == ["failure"] and "learning rate differs: 0.1 and 0.2\n" in notes


def test_preflight_tells_a_case_for_each_property(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n    optimizer.zero_grad(); model(torch.randn(8, 4)).square().mean().backward(); optimizer.step()\n"
    )
    command = [sys.executable, "-m", "trainprobe", "preflight", "--only", "determinism", "--only", "gradient"]
    command += ["--junit", str(tmp_path / "answer.xml"), "--github", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [tag for tag, _ in read(tmp_path / "answer.xml")] == ["system-out"] * 2 and done.stderr.count("::notice") == 2


def test_texts_that_a_format_cannot_hold_are_written_all_the_same(tmp_path, capsys):
    strange = "a\x00b <&> 50% ::error::\nsecond"
    tell("judge", [PipelineCase("na:me, one", "failure", strange, ["more"])] * 12, tmp_path / "answer.xml", True)
    assert read(tmp_path / "answer.xml") == [("failure", "a�b <&> 50% ::error::\nsecond")] * 12
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["::error title=trainprobe judge%3A na%3Ame%2C one::a\x00b <&> 50%25 ::error::%0Asecond%0Amore"] * 10
    assert main(["judge", str(train(tmp_path / "run", monitor=True)), "--junit", str(tmp_path / "none" / "a.xml")]) == 3


def test_fixtures_of_pytest_pass_and_fail_with_the_answer(tmp_path):
    a, b, c = (train(tmp_path / name, record="L0", monitor=True) for name in "abc")
    assert_healthy(a)
    assert_same_run(a, b)
    broken = train(tmp_path / "broken", nan=True, monitor=True)
    with pytest.raises(AssertionError, match=r"is not healthy\nerror nonfinite: .*step 1"):
        assert_healthy(broken)
    with pytest.raises(AssertionError, match="first"):
        assert_same_run(a / "step0", c / "step1")
    test = tmp_path / "test_mine.py"
    test.write_text(
        "def test_healthy(assert_healthy, assert_same_run):\n"
        f"    assert_healthy({str(a)!r}); assert_same_run({str(a)!r}, {str(b)!r})\n"
        f"def test_broken(assert_healthy):\n    assert_healthy({str(broken)!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout and "is not healthy" in done.stdout, done.stdout


def test_the_plug_in_is_declared_and_imports_nothing_at_the_start():
    assert 'trainprobe = "trainprobe.pytest_plugin"' in (ROOT / "pyproject.toml").read_text()
    code = (
        "import sys, trainprobe.pytest_plugin; print([m for m in ('torch', 'numpy', 'pydantic', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
