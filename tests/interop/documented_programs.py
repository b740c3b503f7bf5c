"""The programs of mindstudio-probe's documentation, and one for each public call that has none: as text, to be run unchanged.

What the documentation leaves to the reader ("…", a path) is filled in. Release 26.2.0 carries no pages, so these are those of
1.3.0 and 8.1.1, and calls that are only in its source.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

Programs = dict[str, dict[str, str]]  # what it shows → "program", and the text of each file that it needs
SETTINGS = {"dump_path": "./dump_path", "rank": [], "step": [], "risk_level": "ALL"}


def config(level: str, task: str = "statistics", **section: object) -> str:
    """Return a config.json."""
    return json.dumps({"task": task, **SETTINGS, "level": level, task: section})


def monitor(**keys: object) -> str:
    """Return a configuration of the monitor."""
    return json.dumps({"targets": {}, "ops": ["norm", "max"], "ndigits": 12, **keys})


LOOP = """
for data, label in data_loader:
    debugger.start(model=model)
    loss = (model(data) - label).sum()
    loss.backward()
    debugger.stop()
    debugger.step()
"""
DUMP = "from msprobe.pytorch import PrecisionDebugger\ndebugger = PrecisionDebugger(config_path='./config.json')\n"
TRAIN = "for data, label in data_loader:\n    train(data, label)\n"
MONITOR = "from msprobe.pytorch import TrainerMon\nmonitor = TrainerMon('./monitor_config.json', params_have_main_grad=False)\n"
SET = f"{MONITOR}monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)\n"
L0, L1, DEBUG = ({"config.json": config(level)} for level in ("L0", "L1", "debug"))
ALL = {"monitor_config.json": monitor(xy_distribution=True, all_xy=True, wg_distribution=True, format="api")}


STEP = Path(__file__).parent / "fixtures/statistics_mix/step1/rank0"
PAIR = {
    f"{side}_dump/{file}.json": (STEP / f"{file}.json").read_text(encoding="utf-8")
    for side in ("npu", "bench")
    for file in ("dump", "stack", "construct")
}


def programs(folders: Mapping[str, Path]) -> Programs:
    """Return all programs. folders: release → its folder of documentation."""
    old, new = folders["1.3.0"], folders["8.1.1"]
    dumps, saves, monitors = "05.data_dump_PyTorch.md", "28.debugger_save_instruction.md", "19.monitor.md"
    key_data, checks = "34.RL_collect.md", "31.config_check.md"
    across = block(new / dumps, "from module import ModuleOP")
    texts: dict[str, tuple[str, Mapping[str, str]]] = {
        "quick start": (block(new / dumps, "debugger.start(model=module)"), {}),
        "quick start of 1.3.0": (block(old / dumps, "PrecisionDebugger(config_path=None)", "debugger.start(model=module)"), L1),
        "forward and backward of each step": (with_loss(block(new / dumps, "debugger.stop()  # 关闭数据dump")), L1),
        "forward_backward_dump_end": (with_loss(block(new / dumps, "debugger.forward_backward_dump_end()")), L1),
        "module_dump, module_dump_end": (block(new / dumps, 'module_dump(module, "MyModuleOP")'), L1),
        "start and stop in another file": (
            across,
            {**L1, "module.py": block(new / dumps, "PrecisionDebugger.start()\n")},
        ),
        "a function that was imported before": (block(new / "FAQ.md", "from torch import relu"), {}),
        "save, with a configuration": (f"{block(new / saves, 'debugger = PrecisionDebugger(')}\n{saved(new / saves)}", DEBUG),
        "save, without a configuration": (f"{block(new / saves, 'PrecisionDebugger(dump_path=')}\n{saved(new / saves)}", {}),
        "save of a tensor and its gradient": (
            f"{DUMP}y = model(data_loader[0][0]) * 2\ndebugger.save({{'y': y, 'list': [y, 3, 'text']}}, 'point')\n"
            "y.sum().backward()\ndebugger.step()\n",
            DEBUG,
        ),
        "set_init_step": (f"{DUMP}debugger.set_init_step(5)\n{LOOP}", L0),
        "register_custom_api, restore_custom_api": (
            f"{DUMP}import mine\ndebugger.register_custom_api(mine, 'twice')\ndebugger.start()\n"
            "mine.twice(data_loader[0][0])\ndebugger.stop()\ndebugger.restore_custom_api(mine, 'twice')\ndebugger.step()\n",
            {**L1, "mine.py": "def twice(x):\n    return x + x\n"},
        ),
        "the model in the constructor": (DUMP.replace("json')", "json', model=model)") + LOOP.replace("model=model", ""), L0),
        "start(model=[two modules])": (
            f"{DUMP}parts = [torch.nn.Sequential(model.first), torch.nn.Sequential(model.second)]\n"
            + LOOP.replace("model=model", "model=parts"),
            L0,
        ),
        "start(token_range=)": (
            f"{DUMP}debugger.start(model=model, token_range=[1, 2])\nfor _ in range(4):\n    model(data_loader[0][0])\n"
            "debugger.stop()\ndebugger.step()\n",
            L0,
        ),
        "start(rank_id=)": (f"{DUMP}{LOOP.replace('model=model', 'model=model, rank_id=3')}", L0),
        "seed_all()": (f"from msprobe.pytorch import seed_all\nseed_all()\n{DRAWN}", {}),
        "seed_all(seed, mode, rm_dropout)": (f"from msprobe.pytorch import seed_all\nseed_all(7, True, True)\n{DRAWN}", {}),
        "seed_all from msprobe.pytorch.common": (f"from msprobe.pytorch.common import seed_all\nseed_all(7)\n{DRAWN}", {}),
        "random_save": ("from msprobe.pytorch import random_save\nrandom_save('./out')\ntorch.rand(3)\n", {}),
        "PrecisionDebugger.monitor": (
            block(new / "17.grad_probe.md", "debugger.monitor(model)").replace("config_json_path", "./config.json")
            + f"\n{TRAIN}",
            {"config.json": json.dumps({"task": "grad_probe", **SETTINGS, "grad_probe": {"grad_level": "L1"}})},
        ),
        "GradComparator": ("from msprobe import *\nGradComparator\n", {}),
        "free_benchmark": (
            with_loss(DUMP + LOOP),
            {"config.json": config("L1", "free_benchmark", list=["linear"], fuzz_device="npu", if_preheat=False)},
        ),
        "compare": (block(new / "10.accuracy_compare_PyTorch.md", "from msprobe.pytorch import compare"), PAIR),
        "compare_distributed": (
            block(new / "10.accuracy_compare_PyTorch.md", "compare_distributed('./npu_dump/step0'"),
            {name.replace("bench_", "gpu_").replace("dump/", "dump/step0/rank0/"): text for name, text in PAIR.items()},
        ),
        "PtdbgDispatch": ("from msprobe.pytorch.online_dispatch import PtdbgDispatch\n", {}),
        "set_monitor": (f"{SET}{TRAIN}", {"monitor_config.json": monitor(wg_distribution=True)}),
        "set_wrapped_optimizer, monitor_gnorm_with_ad": (
            f"{old_monitor(block(new / monitors, 'monitor.set_wrapped_optimizer(optimizer)'))}\n{TRAIN}",
            {"monitor_config.json": monitor(wg_distribution=True)},
        ),
        "reload_xy": (
            f"{SET}{TRAIN}monitor.reload_xy(xy_distribution=True)\n{TRAIN}",
            {"monitor_config.json": monitor(xy_distribution=False, all_xy=True, wg_distribution=True)},
        ),
        "generate_wgrad_metrics": (f"{SET}{TRAIN}reduced, unreduced = monitor.generate_wgrad_metrics()\n", ALL),
        "generate_xy_metrics": (f"{SET}{TRAIN}actv, actv_grad = monitor.generate_xy_metrics()\n", ALL),
        "ops while it runs": (
            f"{SET}{TRAIN}monitor.ops = ['min', 'max']\n{TRAIN}",
            {"monitor_config.json": monitor(wg_distribution=True)},
        ),
        "csv2tensorboard_by_step": (
            f"{SET}{TRAIN}monitor = None\n"
            + re.sub(
                r'"~/[^"]*"|"Dec03_[^"]*-40"',
                lambda m: '"monitor_output"' if "~" in m[0] else '"Jan01_00-00-00"',
                csv(new / monitors),
            ),
            {"monitor_config.json": monitor(param_distribution=True)},
        ),
        "TrainerMonitorV2": (
            "import os\nfrom msprobe.core.monitor_v2 import TrainerMonitorV2\nos.mkdir('monitor_output')\n"
            "monitor = TrainerMonitorV2('./second.json')\n"
            f"monitor.start(model=model, optimizer=optimizer)\n{TRAIN}monitor.stop()\n",
            {
                "second.json": json.dumps(
                    {"framework": "pytorch", "output_dir": "monitor_output", "monitors": {"param": {"enabled": True}}}
                )
            },
        ),
        "SingleSave.save": (
            f"response, prompt = torch.ones(3), torch.arange(2)\n{block(new / key_data, 'SingleSave.save({')}\n" + WRITTEN,
            {},
        ),
        "SingleSave.save of several": (
            f"response, prompt = torch.ones(3), torch.arange(2)\n{block(new / key_data, 'prompt,')}\n{WRITTEN}",
            {},
        ),
        "SingleSave.save_config": (
            f"configurations_json = {{'n': 4}}\n{block(new / key_data, 'save_config')}\n",
            {},
        ),
        "ConfigChecker": (
            block(new / checks, "apply_patches(fmk)").replace("fmk", '"pytorch"')
            + "\n"
            + block(new / checks, "ConfigChecker(model,").replace(
                "model, shell_path, output_zip_path, fmk", 'model, ["train.sh"], "./pack.zip", "pytorch"'
            )
            + f"\n{TRAIN}",
            {"train.sh": "python train.py --lr 0.1\n"},
        ),
    }
    return {name: {"program": program, **files} for name, (program, files) in texts.items()}


DRAWN = """
import random
import numpy
print("drawn", random.random(), float(numpy.random.rand()), float(torch.rand(1)), torch.are_deterministic_algorithms_enabled())
print("drawn", float((torch.nn.Dropout(0.5)(torch.ones(64)) == 0).float().mean()) > 0)
torch.use_deterministic_algorithms(False)
"""
WRITTEN = "import time\ntime.sleep(0.5)\n"  # processes of that tool write while the program goes on


def blocks(path: Path) -> list[str]:
    """Return the code blocks of a page."""
    found: list[str] = []
    lines: list[str] | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            if lines is not None:
                found.append(textwrap.dedent("\n".join(lines)))
            lines = [] if lines is None else None
        elif lines is not None:
            lines.append(line)
    return found


def block(path: Path, *marks: str) -> str:
    """Return the first code block of a page that holds the last of these texts, or the first of them."""
    return next(text for mark in reversed(marks) for text in blocks(path) if mark in text)


def with_loss(text: str) -> str:
    """Fill in the loss that the documentation leaves out."""
    return text if "loss =" in text else re.sub(r"(?m)^( *)(output = model\(data\).*)$", r"\1\2\n\1loss = output.sum()", text)


def saved(path: Path) -> str:
    return f"{block(path, 'dict_variable')}\ndebugger.step()\n"


def old_monitor(text: str) -> str:
    """Return the program of the older interface for a model that is not Megatron's."""
    steps = re.sub(r"args\.[^,]*", "1", text)
    return steps.replace("params_have_main_grad=True", "params_have_main_grad=False")


def csv(path: Path) -> str:
    """Return the conversion of all CSV files."""
    text = block(path, "csv2tensorboard_by_step(\n")
    return text.replace('"Dec03_21-34-42"', '"Dec31_23-59-59"').replace("process_num=8", "process_num=1")
