"""What is to be called when Python starts is called, in child processes too, and the program's own sitecustomize runs."""

from __future__ import annotations

import subprocess
import sys

from trainprobe.engine.at_start import environment_for

PROGRAM = """
import subprocess, sys
print("program", flush=True)
subprocess.run([sys.executable, "-c", "print('child')"], check=True)
"""


def test_all_that_asked_are_called_once_in_each_process_and_the_programs_own_sitecustomize_after_them(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"def at_start():\n    print('{name}', flush=True)\n")
    (tmp_path / "sitecustomize.py").write_text("print('own', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for module in ("one", "two", "one"):
        for name, value in environment_for(module).items():
            monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["two", "one", "own", "program", "two", "one", "own", "child"]
