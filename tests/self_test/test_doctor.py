"""`trainprobe doctor`: faults that keep a training from being watched, and what is merely absent."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import trainprobe
from trainprobe.cli import main
from trainprobe.engine import compiled
from trainprobe.self_test import doctor_command
from trainprobe.self_test.doctor_command import EXTRAS

FRAMEWORKS = {"torch", "lightning", "transformers", "deepspeed", "megatron", "mindspore", "mindformers"}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_whole_environment_has_no_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text = said(capsys, str(tmp_path / "not" / "yet" / "there"))
    assert code == 0 and "a training can be watched here" in text
    assert f"torch ok {metadata.version('torch')}" in text and f"trainprobe ok {trainprobe.__version__}" in text
    assert "GB free in" in text


def test_every_extra_is_told_and_a_missing_one_with_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = set(metadata.metadata("trainprobe").get_all("Provides-Extra") or ())
    assert set(EXTRAS) == declared - FRAMEWORKS
    of_package = metadata.version
    monkeypatch.setattr(
        doctor_command, "version_of", lambda name: "" if name == "duckdb" else of_package(name) if name == "torch" else "1"
    )
    code, text = said(capsys)
    assert "[fleet] –" in text and "pip install 'trainprobe[fleet]'" in text
    assert "[xlsx] ok" in text
    assert code == int("FAULT" in text)


def test_what_prevents_a_training_from_being_watched_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "native", None)
    monkeypatch.setattr(doctor_command, "version_of", lambda name: "2.3.1" if name == "torch" else "")
    code, text = said(capsys)
    assert code == 1
    assert "compiled part FAULT" in text and "torch FAULT 2.3.1 is older than 2.4" in text
    assert re.search(r"2 faults: compiled part; torch$", text)
