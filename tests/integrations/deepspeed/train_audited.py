"""One rank of DeepSpeed trainings under the audit of every step; writes FOLDER/NAME FAULT.RANK.json: what was found.

train_audited.py FOLDER NAME@FAULT…    names: those of small_deepspeed. Faults begin behind step 2: drift (rank 1 writes to a
weight), moments (lost), data (the same on all ranks), norm (the ranks do not add up theirs). Those of `LATE` begin behind step
33, which is not audited: none, and copy (rank 1 writes to all of its copy of a weight).
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
LATE = ("none", "copy")


def main(folder: Path, name: str, fault: str = "") -> None:
    """Train and write what was found on this rank."""
    engine = small.engine_with(int(name[4]), name.split("-")[1], **small.CONFIGURATIONS.get(name, {}))
    faulty, steps, every = (33, 40, 20) if fault in LATE else (2, 5, 1)
    plan = {"level": "off", "sinks": [], "audit": {"every": every}}
    attach(engine, plan, output=folder / f"{name} {fault} out")
    probe: Any = probe_of(engine)
    count = small.ACCUMULATE * steps
    mine = small.batches(RANK, count)
    if fault == "data":
        mine[small.ACCUMULATE * faulty :] = small.batches(0, count)[small.ACCUMULATE * faulty :]
    small.train(engine, mine[: small.ACCUMULATE * faulty])
    spoil(fault, engine)
    small.train(engine, mine[small.ACCUMULATE * faulty :])
    detach(engine)
    found = [[f.rule, f.step, f.site.name if f.site else None, f.message] for f in probe.findings]
    (folder / f"{name} {fault}".strip()).with_suffix(f".{RANK}.json").write_text(json.dumps(found))
    engine.destroy()


def spoil(fault: str, engine: Any) -> None:
    """Do what is wrong from step `faulty` + 1 on."""
    with torch.no_grad():
        if fault == "drift" and RANK == 1:
            held = getattr(engine.module.fc2.weight, "ds_tensor", engine.module.fc2.weight)
            held.view(-1)[1] += 0.1
        if fault == "copy" and RANK == 1:
            engine.module.fc2.weight.mul_(1.01)
        if fault == "moments":
            for state in engine.basic_optimizer.state.values():
                state["exp_avg"].zero_()
    if fault == "norm":
        optimizer = engine.optimizer
        step = optimizer.step

        def step_with_own_norm(*args: Any, **kwargs: Any) -> Any:
            out = step(*args, **kwargs)
            optimizer._global_grad_norm = optimizer._global_grad_norm / torch.distributed.get_world_size() ** 0.5
            return out

        optimizer.step = step_with_own_norm


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed()
    for told in sys.argv[2:]:
        main(Path(sys.argv[1]), *told.split("@"))
    torch.distributed.destroy_process_group()
