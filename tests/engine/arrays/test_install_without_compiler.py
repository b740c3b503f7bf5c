"""Where there is no compiler the package is built all the same, without the compiled part, and says what it cannot do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import trainprobe
from trainprobe.cli import main

ROOT = Path(__file__).resolve().parents[3]


def test_a_build_without_a_compiler_succeeds_and_says_that_it_cannot_record(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    arrays = Path("trainprobe/engine/arrays")
    shutil.copytree(ROOT / arrays / "native", tmp_path / arrays / "native")
    (tmp_path / "trainprobe/engine/core").mkdir()
    shutil.copy(ROOT / "trainprobe/engine/core/row_schema.py", tmp_path / "trainprobe/engine/core")
    (tmp_path / "README.md").touch()
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out"],
        cwd=tmp_path,
        env={**os.environ, "CC": "false", "CXX": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("_native*"))
    assert "no training can be recorded" in done.stderr + done.stdout


WITHOUT = """
import sys; sys.modules['trainprobe._native'] = None
import pathlib, torch, trainprobe, trainprobe.cli, trainprobe.dump_compare.command, trainprobe.monitor.report.from_run
from trainprobe.errors import ProbeError
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows, native_in_use
s = TorchStatsRows(3); s.add(torch.arange(5.)); p, c, _ = s.drain()
print(native_in_use(), p[0][7], len(c))
for level in ("L0", "L1", "off"):
    try:
        with trainprobe.watch(torch.nn.Linear(2, 2), output=sys.argv[1], level=level, monitor=True):
            print("it records")
    except ProbeError as refused:
        print(refused)
print(pathlib.Path(sys.argv[1]).exists())
"""


def test_without_the_compiled_part_files_can_be_read_and_recording_is_refused_in_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    numbers, *refusals, written = done.stdout.splitlines()
    assert numbers.split() == ["False", "10.0", "1"]
    assert len(refusals) == 3 and written == "False"
    assert all("install the wheel" in said and "C compiler" in said for said in refusals)


READING = """
import sys; sys.modules['trainprobe._native'] = None
from trainprobe.cli import main
print([main(command.split()) for command in sys.argv[1:]], file=sys.stderr)
"""


def test_without_the_compiled_part_a_dump_and_a_run_are_judged_as_with_it(tmp_path: Path) -> None:
    sides = [str(tmp_path / side) for side in ("a", "b")]
    for side in sides:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        with trainprobe.watch(model, output=side, level="mix", monitor=True, sinks=("dump", "jsonl"), console=False) as probe:
            for _ in range(2):
                with probe.step():
                    (model(torch.ones(3, 4)) * (1 + (side == sides[1]))).sum().backward()
    commands = [f"dump-compare {sides[0]} {sides[1]}", f"dump-compare {sides[0]} {sides[0]}", f"judge {sides[0]}"]
    done = subprocess.run([sys.executable, "-c", READING, *commands], cwd=ROOT, capture_output=True, text=True, timeout=120)
    codes = [main(command.split()) for command in commands]
    assert codes[:2] == [2, 0]
    assert done.stderr.splitlines()[-1] == str(codes), done.stderr
