"""`trainprobe doctor`: what it says of this machine, and of one that lacks something."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainprobe import compiled
from trainprobe.cli import main
from trainprobe.engine.plan.command import sentences
from trainprobe.engine.plan.loading import load_plan
from trainprobe.self_test import doctor_command


def told(capsys: pytest.CaptureFixture[str], folder: Path, code: int) -> list[str]:
    assert main(["doctor", str(folder)]) == code
    return capsys.readouterr().out.splitlines()


def test_a_machine_that_can_record_is_told_with_its_frameworks_and_what_would_be_watched(capsys, tmp_path):
    lines = told(capsys, tmp_path / "out", 0)
    assert [line for line in lines if line.startswith("MISSING")] == []
    assert f"torch {importlib.metadata.version('torch')}" in lines[2]
    assert [line.strip() for line in lines[-4:]] == list(sentences(load_plan(output=tmp_path / "out")))
    assert f"GB free in {tmp_path}" in "".join(lines)


def test_what_is_missing_is_named_with_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "native", None)
    monkeypatch.setattr(doctor_command, "FRAMEWORKS", ("mindspore-that-is-not-here",))
    (tmp_path / "file").write_text("")
    missing = [line for line in told(capsys, tmp_path / "file", 1) if line.startswith("MISSING")]
    assert len(missing) == 3
    for line, word in zip(
        missing, ("install a C compiler", "pip install 'trainprobe[torch]'", "cannot be written"), strict=True
    ):
        assert word in line


def test_extras_are_those_of_the_package_and_no_framework_is_imported(tmp_path):
    assert doctor_command._extras()["xlsx"] == ["openpyxl"]
    code = "import sys; from trainprobe.cli import main; main(['doctor']); assert not {'torch', 'lightning'} & {*sys.modules}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
