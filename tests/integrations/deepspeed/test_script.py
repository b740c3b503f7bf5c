"""A DeepSpeed script that is not edited: `trainprobe run plan.yaml -- script.py`, alone and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, free_port
from tests.integrations.records import recorded, steps_of

SCRIPT = str(Path(__file__).with_name("loop_script.py"))
WATCH = ("-m", "trainprobe", "run", "plan.yaml", "--")
PLAN = "output: out\nlevel: L0\nstep: 2\nmonitor:\n  optimizer_state: true\naudit:\n  every: 1\n"
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.fixture
def folder(require, tmp_path) -> Path:
    require("deepspeed")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


def run(*command: str, cwd: Path, code: int = 0) -> list[str]:
    """Run Python; return the lines that the training printed, in the order of ranks."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRAINPROBE_ON_ERROR": "raise"}
    environment = {**os.environ, **alone, **own}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)
    assert (done.returncode != 0) == (code != 0), done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


@pytest.mark.proves("DeepSpeed", "a script that is not edited")
def test_a_script_is_run_unedited_with_the_same_output_and_its_steps_and_micro_batches_seen(folder):
    assert run(*WATCH, SCRIPT, cwd=folder) == run(SCRIPT, cwd=folder) != []
    found = recorded(folder / "out")
    assert list(found) == [1, 2, 3, 4]
    assert all(
        {"loss", "grad_norm", "lr", "0.weight grad", "3.bias exp_avg_after"} <= set(numbers) for numbers in found.values()
    )
    (step_data,) = (step_data for step_data in steps_of(folder / "out") if step_data.step == 2)
    assert [call.micro for call in step_data.calls if call.name == "0" and call.phase == "forward"] == [0, 1]


@pytest.mark.proves("DeepSpeed", "torchrun", ranks=2)
def test_every_rank_that_torchrun_starts_is_watched(folder):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}", SCRIPT)
    assert run(*WATCH, *launcher, cwd=folder) == run(*launcher, cwd=folder) != []
    one, two = (recorded(folder / "out", rank) for rank in range(2))
    assert list(one) == list(two) == [1, 2, 3, 4]
    assert one[4]["loss"] != two[4]["loss"]
    assert one[4]["grad_norm"] == two[4]["grad_norm"]


def test_a_script_that_fails_keeps_its_error_and_what_was_seen(folder):
    run(*WATCH, SCRIPT, "crash", cwd=folder, code=1)
    collected_steps = list(steps_of(folder / "out"))
    assert [(step_data.step, step_data.complete) for step_data in collected_steps] == [(1, True), (2, True), (3, False)]


def test_beneath_a_trainer_its_callback_alone_finds_the_engine(folder, require):
    require("transformers")
    require("accelerate")
    run(*WATCH, str(Path(__file__).with_name("trainer_script.py")), cwd=folder)
    found = recorded(folder / "out")
    assert list(found) == [1, 2, 3, 4]
    assert all({"loss", "grad_norm", "skipped"} <= set(numbers) for numbers in found.values())
    assert any(key.endswith(" exp_avg_after") for key in found[1])
