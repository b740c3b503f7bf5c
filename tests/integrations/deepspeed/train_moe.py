"""One rank of mixtures of experts under DeepSpeed, each with and without the probe; leaves what came of them in FOLDER.

train_moe.py FOLDER NAME…    names: those of small_moe.engine_with; with @FAULT one is planted: nan, drift.
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
import torch  # noqa: E402

from tests.integrations.deepspeed import small_deepspeed as small  # noqa: E402
from tests.integrations.deepspeed import small_moe as moe  # noqa: E402
from trainprobe.integrations.deepspeed import attach, detach, probe_of  # noqa: E402

RANK = int(os.environ["RANK"])
FAULTY = 2  # steps before the fault
PLAN = {
    "level": "off",
    "monitor": {"optimizer_state": True, "gradients": {"unreduced": True, "per_micro": True}, "activations": False},
    "audit": {"every": 1},
}


def compared(folder: Path, name: str) -> dict[str, Any]:
    """Train bare and watched; tell what differs, what was left on the engine, and what was found."""
    bare = moe.engine_with(name)
    plain = small.bits(bare, small.train(bare, small.batches(RANK)))
    bare.destroy()
    engine = moe.engine_with(name)
    before = small.traces(engine)
    attach(engine, PLAN, output=folder / name)
    probe: Any = probe_of(engine)
    losses = small.train(engine, small.batches(RANK))
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
    """Train with something wrong in the second local expert of rank 1 from step FAULTY + 1 on."""
    engine = moe.engine_with(name)
    attach(engine, PLAN, output=folder / f"{name} {fault}")
    probe: Any = probe_of(engine)
    weight = dict(engine.module.named_parameters())[f"{moe.PATH}.1.down.weight"]
    data = small.batches(RANK)
    small.train(engine, data[: small.ACCUMULATE * FAULTY])
    if RANK == 1 and fault == "drift":
        with torch.no_grad():
            weight.view(-1)[1] += 0.1
    if RANK == 1 and fault == "nan":
        weight.register_hook(lambda g: g * float("nan"))
    small.train(engine, data[small.ACCUMULATE * FAULTY :])
    detach(engine)
    engine.destroy()
    return {"found": findings(probe)}


def findings(probe: Any) -> list[list[Any]]:
    return [
        [f.rule, f.step, f.place.rank, f.site.name if f.site else None, f.site.slot if f.site else None, f.message]
        for f in probe.findings
    ]


def main(folder: Path, names: list[str]) -> None:
    import deepspeed

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
