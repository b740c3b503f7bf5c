"""Key data that SingleSave of mindstudio-probe wrote is read here, and what is written here is read there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from openpyxl import load_workbook

from tests.interop.peer import PEER, needs_peer
from trainprobe import SingleComparator, SingleSave

pytestmark = needs_peer


def run(*arguments: object) -> None:
    script = Path(__file__).with_name("key_data.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(PEER), script, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def save_the_same(folder: Path, shift: float = 0.0) -> None:
    """Save with trainprobe what key_data.py saves with the other tool."""
    generator = torch.Generator().manual_seed(0)
    SingleSave(folder)
    for step in range(2):
        for _ in range(2):
            log_prob = torch.rand(3, 4, generator=generator) + (shift if step else 0)
            SingleSave.save(
                {"response": [torch.arange(4), torch.arange(3)], "log_prob": log_prob, "mask": {"a": torch.ones(2)}}
            )
        SingleSave.step()
    SingleSave.save_config({"n": 4})
    SingleSave.close()


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def sheet(path: Path) -> list[list[object]]:
    head, *rows = load_workbook(path).active.iter_rows(values_only=True)
    return [list(row[:12]) for row in rows] if head[0] == "step" else pytest.fail(f"{path} has no header")


def test_both_tools_write_the_same_files_and_compare_them_alike(tmp_path):
    run("save", tmp_path / "theirs", 0)
    save_the_same(tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    assert json.loads((tmp_path / "ours/configurations.json").read_text()) == {"n": 4}
    assert SingleComparator.compare(tmp_path / "ours", tmp_path / "theirs", tmp_path / "same").code == 0
    save_the_same(tmp_path / "shifted", 0.25)
    found = SingleComparator.compare(tmp_path / "theirs", tmp_path / "shifted", tmp_path / "by_us")
    assert found.code == 2 and found.first is not None and found.first.address.key == "log_prob"
    run("compare", tmp_path / "theirs", tmp_path / "shifted", tmp_path / "by_them")
    ours, theirs = sheet(tmp_path / "by_us/log_prob.xlsx"), sheet(tmp_path / "by_them/log_prob.xlsx")
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[:8] == other[:8]
        assert mine[8:] == pytest.approx(other[8:], rel=1e-6)  # float32 there
