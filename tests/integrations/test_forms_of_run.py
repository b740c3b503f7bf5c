"""Each form of `trainprobe run` in docs/integrations/plain_loop.md, carried out with the real launcher.

Slurm is not installed with the tests: a script plays `srun`, which shows the command line and not how Slurm starts tasks.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.records import recorded
from tests.matrices import covered

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/integrations/plain_loop.md").read_text(encoding="utf-8")
FORMS = re.findall(r"^\| `(trainprobe run .*?)` \|", PAGE, flags=re.M)
SCRIPT = """
import os, sys
import torch
from torch import nn

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(rank)
model = nn.Linear(4, 2)
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
with open(f"given{rank}", "w") as file:
    file.write(" ".join(word for word in sys.argv[1:] if not word.startswith("--local_rank")))
if ranks > 1:
    torch.distributed.destroy_process_group()
"""
SRUN = """#!/bin/sh
shift; tasks=$1; shift
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT WORLD_SIZE=$tasks
for rank in $(seq 0 $((tasks - 1))); do RANK=$rank SLURM_PROCID=$rank "$@" & done
for rank in $(seq $tasks); do wait || exit; done
"""
LAUNCHERS = {"torchrun": "torch", "accelerate": "accelerate", "deepspeed": "deepspeed"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with the script, as a module too, a plan, and `srun`."""
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(SCRIPT)
    (tmp_path / "plan.yaml").write_text("level: L0\nstep: [1]\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    return tmp_path


def test_the_page_has_the_launchers_and_forms_that_people_use():
    told = " ".join(FORMS)
    assert len(FORMS) > 10 and all(word in told for word in (*LAUNCHERS, "srun", "-m package", "plan.yaml", "default"))


def words_of(form: str) -> set[str]:
    """Return which launcher a form has, how it names the script, and whether and how it names a plan."""
    words = {word for word in form.split() if word in (*LAUNCHERS, "srun", "-m", "--", "default", "plan.yaml", "--plan", "-o")}
    return words | ({"without --"} if "--" not in words else set())


@pytest.mark.slow
@pytest.mark.parametrize("form", covered(FORMS, words_of))
def test_a_form_on_the_page_watches_each_rank_and_hands_the_script_its_arguments(form: str, place: Path):
    from tests.distributed.launch import free_port

    words = shlex.split(form)
    launcher = next((word for word in words if word in LAUNCHERS), None)
    if launcher is not None:
        pytest.importorskip(LAUNCHERS[launcher])
    here = {"PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    port = str(free_port())
    here |= {"PORT": port, "MASTER_PORT": port, "HF_HOME": str(place / "hf")}
    command = [sys.executable, "-m", "trainprobe", *words[1:]]
    done = subprocess.run(command, cwd=place, env={**os.environ, **here}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = 2 if re.search(r"-n 2|--nproc-per-node 2", form) else 1
    assert [(place / f"given{rank}").read_text() for rank in range(ranks)] == ["--lr 0.1"] * ranks
    planned = "plan.yaml" in form
    output = place / ("folder" if "-o folder" in form else "probe_out")
    for rank in range(ranks):
        assert list(recorded(output, rank)) == ([1] if planned else [0, 1, 2])
    assert (output / "step1/rank0/dump.json").exists() == planned
    shutil.rmtree(output)
