"""One rank of mixtures of experts and pipelines under DeepSpeed, with and without the probe; what came of them goes to FOLDER.

train_parallel.py FOLDER NAME…    names: those of small_moe.engine_with and of small_pipeline.engine_with. NAME@FAULT plants one
behind step 2: nan, in each gradient of one weight of rank 1; drift, an element of it.
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

from tests.integrations.deepspeed import small_deepspeed as small  # noqa: E402
from tests.integrations.deepspeed import small_moe as moe  # noqa: E402
from tests.integrations.deepspeed import small_pipeline as pipe  # noqa: E402
from trainprobe.integrations.deepspeed import attach, detach, probe_of  # noqa: E402

RANK = int(os.environ["RANK"])
FAULTY = 2  # steps before the fault
PLAN = {
    "level": "off",
    "monitor": {"optimizer_state": True, "gradients": {"unreduced": True, "per_micro": True}, "activations": False},
    "audit": {"every": 1},
}
DUMPED = {"level": "L0", "step": 2}


def engine_with(name: str) -> Any:
    return pipe.engine_with(name) if name.startswith("pipe") else moe.engine_with(name)


def train(engine: Any, steps: slice = slice(small.STEPS)) -> list[torch.Tensor]:
    if hasattr(engine, "train_batch"):
        return pipe.train(engine, steps)
    first, last, _ = steps.indices(small.STEPS)
    return small.train(engine, small.batches(RANK)[small.ACCUMULATE * first : small.ACCUMULATE * last])


def compared(folder: Path, name: str) -> dict[str, Any]:
    """Train bare and watched; tell what differs, what was left on the engine, and what was found."""
    bare = engine_with(name)
    plain = small.bits(bare, train(bare))
    before = small.traces(bare)  # a pipeline engine sets attributes of its own when it trains
    bare.destroy()
    engine = engine_with(name)
    attach(engine, DUMPED if name.endswith("-dump") else PLAN, output=folder / name)
    probe: Any = probe_of(engine)
    losses = train(engine)
    detach(engine)
    left = small.traces(engine)
    watched = small.bits(engine, losses)
    engine.destroy()
    return {
        "left": [key for key in before if before[key] != left[key]],
        "different bits": [key for key in {**plain, **watched} if plain.get(key) != watched.get(key)],
        "axes": probe.place.axes,
        "found": findings(probe),
    }


def spoiled(folder: Path, name: str, fault: str) -> dict[str, Any]:
    """Train with something wrong on rank 1 from step FAULTY + 1 on: in its second expert, or in the weight that is tied."""
    engine = engine_with(name)
    attach(engine, PLAN, output=folder / f"{name} {fault}")
    probe: Any = probe_of(engine)
    weight = dict(engine.module.named_parameters())[pipe.TIED if name.startswith("pipe") else f"{moe.PATH}.1.down.weight"]
    train(engine, slice(0, FAULTY))
    if RANK == 1 and fault == "drift":
        with torch.no_grad():
            weight.view(-1)[1] += 0.1
    if RANK == 1 and fault == "nan":
        weight.register_hook(lambda g: g * float("nan"))
    train(engine, slice(FAULTY, small.STEPS))
    detach(engine)
    engine.destroy()
    return {"found": findings(probe)}


def findings(probe: Any) -> list[list[Any]]:
    return [[f.rule, f.step, f.place.rank, f.site.name if f.site else None, f.message] for f in probe.findings]


def main(folder: Path, names: list[str]) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    deepspeed.init_distributed()
    for told in names:
        name, _, fault = told.partition("@")
        out = spoiled(folder, name, fault) if fault else compared(folder, name)
        (folder / f"{told}.{RANK}.json").write_text(json.dumps(out))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
