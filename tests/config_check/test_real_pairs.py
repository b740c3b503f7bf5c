"""Trainings that were really run, in which exactly one thing was changed: the first line of the report names that thing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config_check.launch import RUNS, compared, environment, run
from tests.matrices import all_cases, covered

PLAIN = {
    "seed": "seed of torch differs: 7 and 8",
    "lr": "learning rate differs: 0.01 and 0.03",
    "weight decay": "weight decay differs: 0.01 and 0",
    "dropout": "dropout p in module second.drop differs: 0.1 and 0.2",
    "extra dropout": "dropout p=0.1 is called 0 times and 4 times, first in micro-step 0, at change.py:36 in Net.forward",
    "data": "seed of torch.Generator.manual_seed differs: 5 and 6, at change.py:53 in samples",
    "late data": "the data differs from micro-step 3 on: 1 of 16 samples is replaced in x",
    "order": "the same batches come in another order",
    "shift": "the same batches come 1 micro-step later in cmp",
    "shuffled": "the same samples come in another order",
    "weight": "weight second.down.weight differs from the start: norm 1.356807882 and 1.356742842",
    "flag": "deterministic algorithms differs: false and true",
}
LIGHTNING = {
    "seed": "seed of torch differs: 7 and 8",
    "lr": "learning rate differs: 0.01 and 0.03",
    "dropout": "dropout p in module net.second.drop differs: 0.1 and 0.2",
    "order": "the same batches come in another order",
    "weight": "weight net.second.down.weight differs from the start: norm 1.356807882 and 1.356742842",
    "clipping": "gradient clipping differs: 1 and 0.5",
}
TRANSFORMERS = {
    "seed": "seed differs: 42 and 43",
    "lr": "learning rate differs: 0.0001 and 0.0003",
    "dropout": "hidden dropout differs: 0.1 and 0.2",
    "order": "the same batches come in another order",
    "weight": "weight transformer.h.1.mlp.c_fc.weight differs from the start",
}
DEEPSPEED = {
    "seed": "seed of torch differs: 7 and 8",
    "lr": "learning rate differs: 0.01 and 0.03",
    "dropout": "dropout p in module second.drop differs: 0.1 and 0.2",
    "order": "the same batches come in another order",
    "weight": "weight second.down.weight differs from the start",
    "accumulation": "global batch size differs: 8 and 4; gradient accumulation steps differs: 2 and 1",
    "flag": "zero_config.overlap_comm differs: false and true",
}
MEGATRON = {
    "seed": "seed of torch differs: 7 and 8",
    "lr": "learning rate differs: 0.001 and 0.003",
    "dropout": "hidden dropout differs: 0.1 and 0.2",
    "order": "the same batches come in another order",
    "weight": "weight decoder.layers.1.mlp.linear_fc2.weight differs from the start",
}
ALL = {
    "plain": PLAIN,
    "lightning": LIGHTNING,
    "transformers": TRANSFORMERS,
    "deepspeed": DEEPSPEED,
    "megatron": MEGATRON,
}
# each change, and in each framework those that it names in words of its own
PAIRS = covered(
    [(framework, change) for framework in ALL for change in ALL[framework]], lambda pair: (pair[0], ALL[pair[0]][pair[1]])
)
TAKEN = [pair.values[0] for pair in PAIRS if all_cases() or not pair.marks]
NEEDS = {"lightning": "lightning", "transformers": "transformers", "deepspeed": "deepspeed", "megatron": "megatron.core"}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], object]) -> Callable[[str], Path]:
    """Return the function that runs one framework with all its changes, once, and gives the folder of packs."""
    done: dict[str, Path] = {}

    def of(framework: str) -> Path:
        if framework not in done:
            if framework in NEEDS:
                require(NEEDS[framework])
            folder = tmp_path_factory.mktemp(framework)
            script = RUNS / ("plain.py" if framework == "plain" else f"{framework}_run.py")
            stage = ["2"] if framework == "deepspeed" else []
            changes = [change for of, change in TAKEN if of == framework]
            run(script, folder, *stage, "base", "again", *changes, distributed=framework in ("deepspeed", "megatron"))
            done[framework] = folder
        return done[framework]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_the_first_line_names_the_one_thing_that_was_changed(packs, pair):
    framework, change = pair
    comparison = compared(packs(framework), change)
    assert comparison.sentence.startswith(ALL[framework][change])
    assert ";" not in comparison.sentence.removeprefix(ALL[framework][change])
    assert comparison.exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("framework", list(ALL))
def test_the_same_training_run_twice_passes(packs, framework):
    comparison = compared(packs(framework), "again")
    assert comparison.sentence == "no difference found: everything that was captured is the same"
    assert comparison.exit_code == 0


@pytest.mark.slow
def test_two_ranks_run_twice_pass_and_other_data_on_one_rank_is_named(packs, tmp_path):
    run(RUNS / "plain.py", tmp_path, "base", "again", "rank data", ranks=2)
    assert compared(tmp_path, "again").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.zip", "base.zip", "rank_data.zip"]
    sentence = compared(tmp_path, "rank data").sentence
    assert sentence == "x differs from micro-step 0 on, the rest of the batch is equal on rank 1"


@pytest.mark.slow
def test_one_rank_and_two_ranks_with_the_same_samples_pass(packs, tmp_path):
    run(RUNS / "plain.py", tmp_path, "base", ranks=2)
    (packs("plain") / "again.zip").rename(tmp_path / "one.zip")
    comparison = compared(tmp_path, "one")
    (tmp_path / "one.zip").rename(packs("plain") / "again.zip")
    assert comparison.exit_code == 0, comparison.sentence
    said = [f.text for check in comparison.checks for f in check.findings]
    assert "the same samples were split over 2 ranks and 1 rank" in said


@pytest.mark.slow
def test_zero_3_shards_of_two_ranks_run_twice_pass(tmp_path, require):
    require("deepspeed")
    run(RUNS / "deepspeed_run.py", tmp_path, "3", "base", "again", "lr", ranks=2)
    assert compared(tmp_path, "again").exit_code == 0
    assert compared(tmp_path, "lr").sentence == "learning rate differs: 0.01 and 0.03"


@pytest.mark.slow
def test_megatron_tensor_parallel_ranks_run_twice_pass_and_one_weight_is_named(tmp_path, require):
    require("megatron.core")
    run(RUNS / "megatron_run.py", tmp_path, "base", "again", "weight", ranks=2)
    assert compared(tmp_path, "again").exit_code == 0
    assert compared(tmp_path, "weight").sentence.startswith(MEGATRON["weight"])


@pytest.mark.slow
def test_one_variable_of_the_environment_is_named(packs, tmp_path):
    run(RUNS / "plain.py", tmp_path, "base", NVIDIA_TF32_OVERRIDE="1")
    (tmp_path / "base.zip").rename(tmp_path / "variable.zip")
    base = packs("plain") / "base.zip"
    (tmp_path / "base.zip").write_bytes(base.read_bytes())
    assert compared(tmp_path, "variable").sentence == "NVIDIA_TF32_OVERRIDE differs: (not set) and 1"


@pytest.mark.slow
def test_one_package_version_is_named(packs, tmp_path):
    site = tmp_path / "site" / "flash_attn-2.6.3.dist-info"
    for version in ("2.6.3", "2.7.0"):
        site.mkdir(parents=True, exist_ok=True)
        (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {version}\n")
        run(RUNS / "plain.py", tmp_path, "base", PYTHONPATH=str(site.parent))
        (tmp_path / "base.zip").rename(tmp_path / f"{version}.zip")
    assert compared(tmp_path, "2.7.0", base="2.6.3").sentence == "flash-attn differs: 2.6.3 and 2.7.0"


SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--hub-token")
lr = parser.parse_args().lr
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=lr)
for _ in range(6):
    optimizer.zero_grad()
    net(torch.randn(6, 4)).sum().backward()
    optimizer.step()
assert not net._forward_pre_hooks
assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
"""


@pytest.mark.slow
def test_a_program_that_was_not_edited_is_captured(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for name, rate in (("base", "1e-2"), ("lr", "3e-2")):
        command = [sys.executable, "-m", "trainprobe", "config-check", "collect", "-o", str(tmp_path / f"{name}.zip"), "--"]
        command += [sys.executable, str(script), "--lr", rate, "--hub-token", "very secret"]
        subprocess.run(command, env=environment(), check=True, timeout=120, cwd=tmp_path)
        assert b"very secret" not in (tmp_path / f"{name}.zip").read_bytes()
    comparison = compared(tmp_path, "lr")
    assert comparison.sentence == "learning rate differs: 0.01 and 0.03"
    assert {check.name for check in comparison.checks if check.compared} == {
        *("environment", "packages", "hyperparameters", "dataset", "weights", "randomness")
    }
