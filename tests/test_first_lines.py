"""The first line that a command prints is its answer: one real case each. docs/messages.md shows them as examples."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.config_check.made_packs import written
from tests.dump_compare.small_runs import Gpt, run
from tests.monitor.nan_trace.test_nan_trace import overflow, train
from tests.record_findings import keep
from tests.rollout.test_rollout import run as roll_out
from trainprobe.cli import main

SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(80):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""
CASES = {  # command line, its exit code, what its first line says
    "run": ("run -- train.py", 0, r"^trainprobe: 80 steps watched, no findings; output in probe_out\. What only an experi"),
    "judge": ("judge nan", 1, r"^error +nonfinite \(step 2, rank 0.*the first infinity of step 2 is in op Tensor\.mul, output"),
    "nan-trace": ("nan-trace nan", 1, r"^the first infinity is of step 2, on rank 0: Tensor\.mul\.0\.forward, output"),
    "dump-compare": ("dump-compare a b", 2, r"^the first difference is at Functional\.gelu\.1\.forward .*'none' in A"),
    "ckpt-compare": ("ckpt-compare a.safetensors b.safetensors", 2, r"^differ: head\.weight is rounded to bfloat16 in B"),
    "config-check": ("config-check compare a.zip b.zip", 1, r"^NCCL_ALGO differs: Ring and Tree"),
    "op-check": ("op-check wrong", 2, r"^step 0, rank 0: .* is a bug: .* \(limit 4\)"),
    "rollout-compare": ("rollout-compare saved_a saved_b -o told", 2, r"^log_prob \(step 1, rank 0, micro-batch 0\) differs"),
    "report": ("report nan", 0, r"^nan/report\.html"),
    "runs": ("runs .", 0, r"^run +ranks +steps +dumped +size +findings"),
    "show": ("show a", 0, r"^a/dump\.html"),
    "plan": ("plan plan.yaml", 0, r"^plan\.yaml can be used"),
    "export": ("export a --trend a.trend.db", 0, r"^a\.trend\.db: 2 steps of 1 rank"),
    "ckpt-show": ("ckpt-show a.safetensors", 0, r"^huggingface: 33 tensors"),
}  # fmt: skip

WITHOUT_A_VERDICT = ("report", "runs", "show", "plan", "export", "ckpt-show")  # a file, a table or a list


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Return a folder with what the command lines name."""
    folder = tmp_path_factory.mktemp("material")
    for name, change in (("a", ""), ("b", "gelu")):
        run(folder / name, change, record="mix", task="tensor")
    shutil.copytree(folder / "a", folder / "wrong")
    file = folder / "wrong/step0/rank0/tensors.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors[next(name for name in tensors if name.startswith("Functional.linear.3.forward.output"))].view(-1)[17] *= 1.01
    save_file(tensors, file)
    train(folder / "nan", overflow)
    torch.manual_seed(0)
    weights = Gpt("", 0.0).state_dict()
    save_file(weights, folder / "a.safetensors")
    save_file(weights | {"head.weight": weights["head.weight"].bfloat16().float()}, folder / "b.safetensors")
    written(folder, "a.zip")
    written(folder, "b.zip", environment={"variables": {"NCCL_ALGO": "Tree"}, "others": {}, "withheld": []})
    roll_out(folder / "saved_a")
    roll_out(folder / "saved_b", change=lambda step, micro, data: data | {"log_prob": data["log_prob"] * (1 + step)})
    (folder / "plan.yaml").write_text("output: runs/a\nrecord: mix\nstep: [0, 1]\n", encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    return folder


@pytest.mark.parametrize("verb", CASES)
def test_the_first_line_of_a_command_is_its_answer(verb, material, monkeypatch, capsys):
    words, code, said = CASES[verb]
    monkeypatch.chdir(material)
    if verb == "run":  # the last line, as others are the script's
        done = subprocess.run([sys.executable, "-m", "trainprobe", *words.split()], capture_output=True, text=True, check=False)
        got, line = done.returncode, done.stderr.splitlines()[-1]
    else:
        got, line = main(words.split()), capsys.readouterr().out.splitlines()[0]
    assert (got, bool(re.search(said, line))) == (code, True), line
    if verb not in WITHOUT_A_VERDICT:
        keep(f"trainprobe {verb}", "info", " ".join(line.split()), None)
