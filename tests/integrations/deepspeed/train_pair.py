"""One rank of DeepSpeed trainings, each with and without the probe; leaves what came of them in a JSON file.

train_pair.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
warnings.filterwarnings("ignore")
import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402

from tests.integrations.deepspeed import small_deepspeed as small  # noqa: E402
from trainprobe.integrations.deepspeed import attach, detach, probe_of  # noqa: E402

RANK = int(os.environ["RANK"])
MONITORED = {"level": "off", "monitor": {"optimizer_state": True, "gradients": {"unreduced": True}, "activations": False}}
EACH_MICRO = {"level": "off", "monitor": {"gradients": {"unreduced": True, "per_micro": True}, "activations": False}}
DUMPED = {"level": "mix", "step": 2}
ALL_DUMPED = {"level": "L0"}
ALWAYS_CUT = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}  # also what is small


def compared(
    told: dict[str, Any], name: str, plan: dict[str, Any], output: Path, direct: bool = False, **settings: Any
) -> None:
    """Train bare and watched; tell what differs, and what the probe left on the engine. name: zeroSTAGE-DTYPE and more."""
    stage, dtype = int(name[4]), name.split("-")[1]
    bare = small.engine_with(stage, dtype, **settings)
    plain = small.bits(bare, small.train(bare, small.batches(RANK), direct))
    bare.destroy()
    engine = small.engine_with(stage, dtype, **settings)
    before = small.traces(engine)
    assert attach(attach(engine, plan, output=output)) is engine
    losses = small.train(engine, small.batches(RANK), direct)
    detach(engine)
    left = small.traces(engine)
    told[f"{name} left"] = [key for key in before if before[key] != left[key]]
    watched = small.bits(engine, losses)
    told[f"{name} different bits"] = [key for key in {**plain, **watched} if plain.get(key) != watched.get(key)]
    engine.destroy()


def poisoned(told: dict[str, Any], name: str, stage: int, dtype: str, output: Path, **settings: Any) -> None:
    """Let rank 1 compute a gradient that is not a number early in step 2; tell who is named, and what DeepSpeed made of it."""
    torch.manual_seed(5)
    net = small.Net()
    micro = iter(range(100))
    if RANK == 1:
        net.fc2.weight.register_hook(lambda g: g * float("nan") if next(micro) == 2 else None)
    engine = small.engine_with(stage, dtype, net=net, **settings)
    attach(engine, EACH_MICRO, output=output)
    probe: Any = probe_of(engine)
    small.train(engine, small.batches(RANK))
    engine.destroy()
    found = [f for f in probe.findings if f.rule == "nonfinite"]
    told[f"{name} named"] = [[f.step, f.place.rank, f.site.name, f.site.slot] for f in found[:1]]
    told[f"{name} skipped steps"] = engine.skipped_steps


def resumed(told: dict[str, Any], folder: Path) -> None:
    """Save behind step 2, load into a new engine, go on for a step under the same output; then load into an attached one.

    The first run is as good as killed: what its rules wrote when it ended is deleted.
    """
    output = folder / "resumed"
    first = attach(small.engine_with(1), MONITORED, output=output)
    small.train(first, small.batches(RANK)[:4])
    first.save_checkpoint(str(folder / "checkpoint"))
    states = [_rules(first)]
    first.destroy()
    (output / f"rank{RANK}" / "monitor_state.json").unlink()
    second = small.engine_with(1)
    second.load_checkpoint(str(folder / "checkpoint"))
    attach(second, MONITORED, output=output)
    states.append(_rules(second))
    small.train(second, small.batches(RANK)[4:])
    second.destroy()
    third = attach(small.engine_with(1), MONITORED, output=output, on_existing="continue")
    third.load_checkpoint(str(folder / "checkpoint"))
    states.append(_rules(third))
    third.destroy()
    told["resumed rules"] = states


def _rules(engine: Any) -> dict[str, Any]:
    monitor = probe_of(engine).monitor
    assert monitor is not None
    return monitor.watcher.state()


def main(folder: Path) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    get_accelerator().is_fp16_supported = lambda: True  # slow on this processor, but right
    deepspeed.init_distributed()
    told: dict[str, Any] = {}
    for name, settings in small.CONFIGURATIONS.items():
        compared(told, name, MONITORED, folder / name, **settings)
    compared(told, "zero3-fp32-dump", DUMPED, folder / "dump")
    compared(told, "zero3-fp32-dump_of_all", ALL_DUMPED, folder / "dump of all")
    compared(told, "zero3-fp32-always_cut", ALL_DUMPED, folder / "always cut", **ALWAYS_CUT)
    compared(told, "zero2-fp32-direct", ALL_DUMPED, folder / "direct", direct=True)
    for stage, dtype, settings in ((0, "fp32", {}), (0, "bf16", {}), (2, "fp32", {"gradient_clipping": 0.0}), (3, "fp32", {})):
        poisoned(told, f"zero{stage}-{dtype}", stage, dtype, folder / f"poisoned{stage}-{dtype}", **settings)
    resumed(told, folder)
    (folder / f"rank{RANK}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
