"""A few steps under each training framework that is installed, with its callback."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from trainprobe.self_test.result import CheckResult

if TYPE_CHECKING:
    from trainprobe.self_test.checks import TestedMachine

_LIMIT = 300  # seconds
_TRANSFORMERS = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from trainprobe.integrations.transformers import ProbeCallback
device, folder = sys.argv[1:3]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
data = [{"input_ids": torch.arange(i, i + 8) % 64, "labels": torch.arange(i, i + 8) % 64} for i in range(8)]
arguments = TrainingArguments(folder + "/hf", max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=device == "cpu")
plan = {"output": folder + "/out", "level": "L0", "console": False, "on_error": "raise"}
Trainer(model, arguments, train_dataset=data, callbacks=[ProbeCallback(plan)]).train()
"""
_LIGHTNING = """
import sys, torch, lightning
from trainprobe.integrations.lightning import ProbeCallback
device, folder = sys.argv[1:3]
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
plan = {"output": folder + "/out", "level": "L0", "console": False, "on_error": "raise"}
where = {"accelerator": {"cpu": "cpu", "cuda": "gpu"}[device], "devices": 1, "default_root_dir": folder}
quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "logger": False}
trainer = lightning.Trainer(max_steps=2, callbacks=[ProbeCallback(plan)], **where, **quiet)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2))
"""
_MINDSPORE = """
import sys, numpy as np, mindspore as ms
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from trainprobe.mindspore import ProbeCallback
device, folder = sys.argv[1:3]
ms.set_device({"cpu": "CPU", "cuda": "GPU", "npu": "Ascend"}[device])
net = nn.Dense(8, 1)
rows = [(np.ones(8, np.float32) * i, np.zeros(1, np.float32)) for i in range(8)]
data = GeneratorDataset(rows, ["x", "y"]).batch(2)
plan = {"output": folder + "/out", "level": "L0", "console": False, "on_error": "raise"}
ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params())).train(1, data, callbacks=[ProbeCallback(plan)])
"""
# package → program, and the devices that it runs on here; the others are named with their version alone
PROGRAMS = {
    "transformers": (_TRANSFORMERS, ("cpu", "cuda", "npu")),
    "lightning": (_LIGHTNING, ("cpu", "cuda")),
    "mindspore": (_MINDSPORE, ("cpu", "cuda", "npu")),
}
_NAMED = ("accelerate", "deepspeed", "megatron-core", "mindformers", "mindspeed")


def installed() -> list[str]:
    """Return the training frameworks that are installed, without importing any."""
    return [name for name in (*PROGRAMS, *_NAMED) if version_of(name)]


def check_framework(name: str, machine: TestedMachine) -> CheckResult:
    """Train two steps under a framework with the tool's callback, in a process of its own, and look for the dump."""
    check, version = f"framework {name}", version_of(name)
    if machine.quick or name not in PROGRAMS:
        why = "--quick does not start it" if name in PROGRAMS else "installed; the self-test has no program for it"
        return CheckResult(check, "not run", f"{name} {version}: {why}")
    program, devices = PROGRAMS[name]
    if machine.device not in devices:
        return CheckResult(check, "not run", f"{name} {version} has no device {machine.device}")
    if name == "transformers" and importlib.util.find_spec("accelerate") is None:
        return CheckResult(check, "not run", f"{name} {version}: its Trainer needs accelerate")
    folder = machine.folder / name
    folder.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, machine.device, str(folder)],
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
            cwd=folder,
        )
    except subprocess.TimeoutExpired:
        return CheckResult(check, "FAIL", f"{name} {version} did not end within {_LIMIT} seconds")
    dumps = sorted((folder / "out").glob("step*/rank0/dump.json"))
    if done.returncode or not dumps:
        return CheckResult(
            check, "FAIL", f"{name} {version} ended with {done.returncode}, {len(dumps)} dumps", done.stderr.splitlines()[-15:]
        )
    return CheckResult(check, "pass", f"{name} {version}: {len(dumps)} steps dumped")


def version_of(package: str) -> str:
    """Return the version of an installed package; nothing where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
