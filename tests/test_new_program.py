"""A program that a newcomer adds is one file: its section of the plan, its checks, its events and its words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NEW = '''
"""Counts the steps; `true` counts each, `every` some."""
from pydantic import BaseModel, ConfigDict, Field
from trainprobe.engine.plan.subplans import read_section
from trainprobe.engine.program import Program, Schedule

WATCHES = "the number of steps"

class Counting(BaseModel):
    model_config = ConfigDict(extra="forbid")
    every: int = Field(1, ge=1)

def validate(settings):
    return read_section("counting", Counting, settings)

def program(making):
    return CountingProgram(validate(making.plan.section("counting")))

class CountingProgram(Program):
    def __init__(self, settings):
        super().__init__("counting", Schedule())
        self.settings, self.steps = settings, []

    def ended(self, step, complete):
        if step % self.settings.every == 0:
            self.steps.append(step)
'''
USE = """
import json, sys
import trainprobe.run.programs
trainprobe.run.programs.__path__.append(sys.argv[1])
import torch, trainprobe
from trainprobe.engine.plan.command import explain_text
model = torch.nn.Linear(2, 2)
try:
    trainprobe.Probe(counting={"evry": 2})
except trainprobe.errors.PlanError as error:
    refused = str(error)
with trainprobe.watch(model, plan={"counting": {"every": 2}, "output": sys.argv[1] + "/out"}) as probe:
    for _ in range(5):
        with probe.step():
            model(torch.ones(1, 2)).sum().backward()
print(json.dumps([probe.program("counting").steps, refused, "**counting**" in explain_text(), probe.plan.level]))
"""


def test_a_new_program_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(NEW)
    ran = subprocess.run([sys.executable, "-c", USE, str(tmp_path)], capture_output=True, text=True, check=True)
    steps, refused, explained, level = json.loads(ran.stdout.splitlines()[-1])
    assert steps == [0, 2, 4]
    assert "counting: evry: unknown key 'evry'" in refused and "did you mean 'every'" in refused
    assert explained and level == "off"
    assert "watching the number of steps" in ran.stderr + ran.stdout
