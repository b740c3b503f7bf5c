"""A program that was meant to stop ends with one line under `trainprobe run`, and with the exit code that it had."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINING = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x = torch.full((2, 3), float("nan") if step == 2 else 1.0)
    if step == 4:
        raise {error}
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""
STOP = "{monitor: {activations: false, rules: {nonfinite: {actions: [stop]}}}}"


@pytest.mark.parametrize(
    ("error", "plan", "code", "said"),
    [
        ("KeyboardInterrupt", "", -2, "trainprobe: interrupted (Ctrl-C) at {script}:8: raise KeyboardInterrupt"),
        ("ValueError", STOP, 1, "trainprobe: rule 'nonfinite' at step 2 stopped the training, as its action `stop` asks"),
        ("ValueError('mine')", "", 1, "ValueError: mine"),
    ],
)
def test_an_expected_stop_ends_without_a_traceback(tmp_path, error, plan, code, said):
    script, file = tmp_path / "train.py", tmp_path / "plan.yaml"
    script.write_text(TRAINING.format(error=error))
    file.write_text(plan)
    asked = [str(file)] if plan else []
    command = [sys.executable, "-m", "trainprobe", "run", *asked, "--output", str(tmp_path / "out"), "--", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert said.format(script=script) in done.stderr.splitlines()
    assert ("Traceback" in done.stderr) == ("mine" in said)
    assert sum("finding" in line and "watched" in line for line in done.stderr.splitlines()) == 1  # the end of the run
