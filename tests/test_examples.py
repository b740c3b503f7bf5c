"""Each example runs by the commands that its first lines give, and prints what it is there to show."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import free_port

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
STARTS = ("python ", "trainprobe ", "torchrun ", "deepspeed ", "echo ")
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]

# example → what its last command prints, its exit code, and what is in the place of its first command where there is no GPU
SHOWN = {
    "plain_loop": ("probe_out/step3/rank0/dump.json", 0, None),
    "new_head": ("the optimizer owns 4 of 6 live trainable parameters: it never updates 4.weight", 0, None),
    "ddp_loop": ("ranks 0, 1 train on the same data", 0, None),
    "lightning_fit": ("error nonfinite: the first NaN of step 6 is in parameter net.2.weight", 0, None),
    "transformers_trainer": ("dump of step 4: probe_out/transformers/step4/rank0/dump.json", 0, None),
    "deepspeed_zero": (
        "the first NaN of step 3 is in parameter 2.weight",
        0,
        "torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py",
    ),
    "megatron_core_loop": ("10 steps watched, no findings", 0, "python examples/megatron_core_loop.py --cpu"),
    "first_nan": ("line 25, in Scale.forward, root = torch.sqrt(self.gain)", 1, None),
    "two_runs": ("approximate is 'none' in A and 'tanh' in B", 2, None),
    "two_checkpoints": ("k and v are exchanged in 2 layers", 2, None),
}


def commands_of(name: str) -> list[str]:
    """Return the commands in the first lines of an example."""
    lines = (ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or "").splitlines()
    return [line.strip() for line in lines if line.strip().startswith(STARTS)]


def test_every_example_is_run():
    """MindSpore's runs in its own environment (tests/mindspore)."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHOWN, "mindspore_model"}


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_what_it_says(name, tmp_path):
    words, code, instead = SHOWN[name]
    commands = [instead, *commands_of(name)[1:]] if instead else commands_of(name)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    here = {"PATH": programs, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu"}
    if name == "megatron_core_loop":
        here |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    assert commands
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env={**os.environ, **here}, capture_output=True, text=True, timeout=300
        )
        last = command == commands[-1]
        assert done.returncode == (code if last else 0), done.stdout[-2000:] + done.stderr[-3000:]
    assert words in done.stdout + done.stderr
