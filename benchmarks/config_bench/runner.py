"""Runs pairs of trainings in processes of their own, compares their packs by the real command, and judges its first line."""

from __future__ import annotations

import atexit
import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from benchmarks.config_bench.case import Case, Edit

ROOT = Path(__file__).resolve().parents[2]
FORK = False  # whether trainings without variables of their own begin in copies of this process, which has imported torch
TRAINING = Path(__file__).parent / "training"


def prepare(folder: Path, edits: Sequence[Edit]) -> None:
    """Copy the training into a folder and edit it."""
    folder.mkdir(parents=True)
    for file in TRAINING.iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)
    for e in edits:
        text = (folder / e.file).read_text()
        assert text.count(e.old) == 1, f"{e.file}: {e.old!r} is there {text.count(e.old)} times"
        (folder / e.file).write_text(text.replace(e.old, e.new))


def train(folder: Path, variables: Mapping[str, str], distributions: Mapping[str, str], arguments: Sequence[str]) -> Path:
    """Run the training that lies in a folder; return its pack."""
    site = folder / "site"
    for name, version in distributions.items():
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    paths = [str(ROOT), *([str(site)] if distributions else []), *filter(None, [variables.get("PYTHONPATH", "")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "TRAINPROBE_ON_ERROR": "raise"}
    if not variables and not distributions and FORK:
        _in_a_fork(folder, lambda: _run_script(["train.py", *arguments]))
    else:
        _in_a_new_interpreter(folder, environment, arguments)
    return next(folder.glob("*/pack.zip"))


def _in_a_new_interpreter(folder: Path, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    command = [sys.executable, "train.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{folder}: {done.stderr[-3000:]}")


def _in_a_fork(folder: Path, work: Callable[[], None]) -> None:
    """Do some work in a copy of this process, whose output goes to `output` in the folder; the copy never returns."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with (folder / "output").open("w") as output, redirect_stdout(output), redirect_stderr(output):
                os.chdir(folder)
                try:
                    work()
                    code = 0
                except SystemExit as end:
                    code = int(end.code or 0)
                except BaseException:  # noqa: BLE001
                    traceback.print_exc()
                atexit._run_exitfuncs()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise RuntimeError(f"{folder}: {(folder / 'output').read_text()[-3000:]}")


def _run_script(words: list[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]  # a training of its own has not imported this bench
    sys.argv = words
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_path(words[0], run_name="__main__")


def run_pair(case: Case, folder: Path, bases: dict[str, Path]) -> tuple[Path, Path]:
    """Return the packs of both sides; the first is made once for all cases that share it."""
    key = repr((case.base, sorted(case.base_variables.items()), sorted(case.base_distributions.items())))
    if key not in bases:
        place = folder / f"base{len(bases)}"
        prepare(place, case.base)
        bases[key] = train(place, case.base_variables, case.base_distributions, ())
    place = folder / ("moved/a/b" if case.moved else "") / re.sub(r"\W+", "_", case.name)
    prepare(place, (*case.base, *case.edits))
    return bases[key], train(place, case.variables, case.distributions, case.arguments)


def compare(bench: Path, cmp: Path) -> tuple[int, str, str]:
    """Return exit code, first line and all that the real command prints."""
    command = [sys.executable, "-m", "trainprobe", "config-check", "compare", str(bench), str(cmp)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    return done.returncode, (done.stdout.splitlines() or [done.stderr])[0], done.stdout + done.stderr


def judge(case: Case, code: int, line: str) -> str:
    """Return how the first line did.

    named: its first cause names the difference; beside: a later cause does; told: the exit code says that something differs;
    missed: it says nothing. Of a harmless pair: quiet or alarm.
    """
    if not case.names:
        return "quiet" if code == 0 else "alarm"
    if re.search(case.names, line.partition("; ")[0]):
        return "named"
    if re.search(case.names, line):
        return "beside"
    return "missed" if code == 0 else "told"
