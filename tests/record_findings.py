"""Runs tests and keeps every finding that they make, in their own processes too: the examples of docs/messages.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = "TRAINPROBE_TESTS_RECORD"  # the environment variable that names the folder of findings


def findings_of(tests: Iterable[str]) -> list[dict[str, Any]]:
    """Run tests, files or folders of tests, and return what they found: rule, severity, message, next, test.

    Raises RuntimeError where one of the tests does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="trainprobe_findings_") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text("import tests.record_findings\n")  # each Python that starts here loads it
        path = os.pathsep.join([name, str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, FOLDER: name, "PYTHONPATH": path}, check=False).returncode
        if code > 1:  # 1: a test failed, which is for those who run the tests
            raise RuntimeError("pytest ran no tests: the lines above say which of them is not there")
        return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()]


def _keep_findings() -> None:
    """Write each finding that is made in this process from now on, one JSON object a line."""
    from trainprobe.engine.core.records import Finding

    made = Finding.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        keep(self.rule, self.severity, self.message, self.next)

    Finding.__init__ = make


def keep(rule: str, severity: str, message: str, next: str | None) -> None:
    """Write down what a test saw, where examples are collected. rule: of a finding; of a command's first line its name."""
    if os.environ.get(FOLDER):
        told = {"rule": rule, "severity": severity, "message": message, "next": next}
        told["test"] = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


if os.environ.get(FOLDER):
    _keep_findings()
