"""What the tool asks of a device, counted by the stand-in accelerator, and that what it says of a device is true."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLANS = ("default plan", "monitor of everything", "L0", "L1, both")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in accelerator is compiled with g++"),
]


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.stand_in.watched"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {found["plan"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_waits_for_nothing_and_comes_to_the_host_once(plan, seen):
    """Not even as it ends, but for a step that is audited."""
    assert seen[plan]["waits"] == [int(audited) for audited in seen[plan]["audited"]]
    assert seen[plan]["transfers"] == [1] * len(seen[plan]["waits"])


@pytest.mark.parametrize("plan", PLANS)
def test_the_training_is_the_same_to_the_bit(plan, seen):
    assert seen[plan]["bits"] is True


@pytest.mark.parametrize("plan", PLANS)
def test_tensors_that_are_gathered_have_the_numbers_that_each_has_by_itself(plan, seen):
    """Those of a module that overwrites its input too, and copies that are under way for 20 ms are not read before."""
    assert min(seen[plan]["values"]) > 30 and seen[plan]["steps"] == [0, 1, 2]
    assert seen[plan]["as one by one"] is True
    assert seen[plan]["as on the host"] in ((None,) if plan == "L1, both" else (True,))


def test_tensors_that_stay_as_they_are_are_reduced_many_at_once(seen):
    assert seen["together"] == {"plan": "together", "groups": [1, 512, 512, 75], "right": True}
