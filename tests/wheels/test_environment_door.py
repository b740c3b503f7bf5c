"""`TRAINPROBE=…` in the environment watches a script that is not edited, in each process that trains and in no other."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="run by `make test-wheels`, in an environment of its own")

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_head.py"
FOUND = "trainprobe: error"
TRAINS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad(); model(torch.randn(3, 4)).square().mean().backward(); optimizer.step()
dist.destroy_process_group()
"""
IMPORTS_IT = """
import torch, trainprobe
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with trainprobe.watch(model, optimizer, record="L0", step=[0]) as probe:
    with probe.step(0):
        model(torch.full((3, 4), float("nan"))).square().mean().backward()
        optimizer.step()
print("left:", len(model._forward_hooks), probe.findings)
"""


@pytest.fixture(scope="module")
def environment(wheel, fresh):
    return fresh(wheel)


@pytest.mark.parametrize("value", ["1", "plan.yaml"])
def test_a_script_is_watched_under_the_plan_that_the_variable_names(environment, tmp_path, value):
    (tmp_path / "plan.yaml").write_text("output: elsewhere\n")
    done = environment.shell(f"TRAINPROBE={value} python {EXAMPLE}", tmp_path)
    assert done.returncode == 0 and FOUND in done.stderr, done.stderr
    assert (tmp_path / ("probe_out" if value == "1" else "elsewhere")).exists()


def test_without_the_variable_nothing_is_imported(environment, tmp_path):
    done = environment.shell("python -X importtime -c pass", tmp_path)
    assert "trainprobe" not in done.stderr


def test_a_process_that_imports_no_framework_is_not_touched(environment, tmp_path):
    done = environment.shell("TRAINPROBE=1 python -X importtime -c 'import json'", tmp_path)
    assert "trainprobe.engine.at_start.door" in done.stderr and "trainprobe.integrations" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_ranks_of_torchrun_write_to_one_folder(environment, tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    done = environment.shell("TRAINPROBE=1 python -m torch.distributed.run --nproc-per-node 2 train.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "probe_out"}
    assert {path.name for path in (tmp_path / "probe_out").glob("rank*")} == {"rank0", "rank1"}
    assert done.stderr.count("4 steps watched") == 1


def test_a_plan_that_is_not_there_is_told_and_the_script_runs(environment, tmp_path):
    done = environment.shell(f"TRAINPROBE=absent.yaml python {EXAMPLE}", tmp_path)
    assert done.returncode == 0 and "TRAINPROBE=absent.yaml: this process is not watched" in done.stderr
    assert not list(tmp_path.iterdir())


def test_off_switches_off_what_a_script_imports(environment, tmp_path):
    (tmp_path / "script.py").write_text(IMPORTS_IT)
    done = environment.shell("TRAINPROBE=off python script.py", tmp_path)
    assert done.returncode == 0 and done.stdout == "left: 0 []\n" and done.stderr == "", (done.stdout, done.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {"script.py"}
