"""Run the stand-in trainer in each way of asking for the probe: `pretrain.py FOLDER WAY…` writes FOLDER/WAY.json."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import torch  # noqa: E402

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "megatron_cpu"), str(HERE), str(HERE / "trainer")]
import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()
import torch.distributed as dist  # noqa: E402
from patches_by_name import Manager  # noqa: E402

from trainprobe.integrations import megatron, mindspeed  # noqa: E402
from trainprobe.integrations.auto_attach import EARLIER, OUTPUT  # noqa: E402

ARGUMENTS = "--hidden 32 --ffn 48 --heads 4 --groups 2 --layers 2 --seq 8 --vocab 60 --vocab-div 16 --steps 3 --micro 2"
MONITOR = {"gradients": {"unreduced": True}, "optimizer_state": True, "activations": False}


def adaptor(manager: Manager) -> None:
    """What an adaptor does at its import: replace the step and the log, and wrap some of what the probe stands around."""
    from megatron.training import training

    step, log = training.train_step, training.training_log

    def train_step(*args, **kwargs):
        return step(*args, **kwargs)

    @functools.wraps(log)
    def training_log(*args, **kwargs):
        return log(*args, **kwargs)

    def noted_wrapper(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            CALLED.append(function.__name__)
            return function(*args, **kwargs)

        return wrapper

    manager.register_patch("megatron.training.training.train_step", train_step)
    manager.register_patch("megatron.training.training.training_log", training_log)
    optimizer = "megatron.core.optimizer.optimizer"
    for name in (
        "megatron.training.training.setup_model_and_optimizer",
        "megatron.core.pipeline_parallel.schedules.forward_step",
        "megatron.core.pipeline_parallel.schedules.get_forward_backward_func",
        "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync",
        f"{optimizer}.MixedPrecisionOptimizer.step_with_ready_grads",
    ):
        manager.register_patch(name, noted_wrapper)
    manager.apply_patches()


CALLED: list[str] = []


def run(folder: Path, way: str) -> dict:
    """Train once, in a trainer that is imported afresh."""
    for name in [name for name in sys.modules if name.startswith("megatron.training")]:
        del sys.modules[name]
    output = folder / ("script.2" if way == "script resumed" else way)
    plan = {"output": str(output), "level": "off", "sinks": ["jsonl"], "on_error": "raise", "monitor": MONITOR}
    path = folder / f"{way}.plan.json"
    path.write_text(json.dumps(plan))
    arguments, provider, manager = ARGUMENTS.split(), None, Manager()
    Manager.FEATURES_LIST.clear()
    CALLED.clear()
    words = way.split()
    if way == "script resumed":  # `trainprobe run` has put it next to the earlier run of that name
        os.environ |= {OUTPUT: str(output), EARLIER: str(folder / "script")}
        arguments += ["--iteration", "3", "--steps", "5"]
    elif "resumed" in words:
        arguments += ["--iteration", "1"]
    if words[0] == "flag":
        provider = megatron.add_probe_args
        arguments += ["--probe-plan", str(path)]
    if words[0] == "passive":
        provider = megatron.add_probe_args
    if words[0] == "install":
        megatron.install(path)
    if words[0] == "before":
        mindspeed.install(path)
    if words[0] in ("before", "after", "patched", "feature"):
        adaptor(manager)
    if words[0] == "after":
        mindspeed.install(path)
    if words[0] == "feature":
        mindspeed.install()
        mindspeed.add_feature(Manager)
        arguments += ["--probe-plan", str(path)]

        def provider(parser):
            for feature in Manager.FEATURES_LIST:
                feature.register_args(parser)
            return parser

    from megatron.training import training

    if words[0] == "script":  # as `trainprobe run` does once the trainer is imported
        megatron.attach_to_script(str(path))
        provider = megatron.add_probe_args

    functions = {name: getattr(training, name) for name in ("train_step", "training_log", "train", "save_checkpoint")}
    model, optimizer = training.pretrain(arguments, provider)
    left = [name for name, function in functions.items() if getattr(training, name) is not function]
    weights = {n: float(p.double().sum()) for n, p in model[0].named_parameters()}
    told = {
        "log": list(training.LOG),
        "weights": weights,
        "left": left,
        "called": sorted(set(CALLED)),
        "own": sorted(vars(optimizer)),
    }
    manager.remove_patches()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    told["written"] = output.exists()
    folder = folder / words[0] if way == "script resumed" else folder / way
    told["kept"] = sorted(path.name for path in folder.rglob("rules_step*.json"))
    files = sorted(folder.rglob("records.jsonl")) if folder.exists() else []
    told["records"] = [line for f in files for line in f.read_text().splitlines()]
    return told


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    for way in sys.argv[2:]:
        (Path(sys.argv[1]) / f"{way}.json").write_text(json.dumps(run(Path(sys.argv[1]), way)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
