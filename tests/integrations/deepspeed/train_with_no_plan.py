"""One process of DeepSpeed under the default plan: `train_with_no_plan.py FOLDER KIND`; writes what warned to alarms.txt."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from tests.integrations.deepspeed import small_deepspeed as small
from trainprobe.engine.plan.defaults import default_plan
from trainprobe.integrations.deepspeed import attach, probe_of

STEPS = 64
folder, kind = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
deepspeed.init_distributed()
stage, dtype = {"bf16": (2, "bf16"), "fp16": (2, "fp16"), "from43": (1, "fp32")}.get(kind) or (int(kind[-1]), "fp32")
warm_up = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": small.LR, "warmup_num_steps": 10}}
get_accelerator().is_fp16_supported = lambda: True  # slow on this processor, but right
half = {"fp16": {"enabled": True, "initial_scale_power": 24}} if dtype == "fp16" else {}  # it comes down, as it does by default
engine = small.engine_with(stage, dtype, scheduler=warm_up, **half)
if kind == "from43":  # steps that nobody watches come first
    small.train(engine, small.batches(0, 43 * small.ACCUMULATE))
engine = attach(engine, output=folder / "out", **default_plan())
small.train(engine, small.batches(0, STEPS * small.ACCUMULATE))
found = [f"{f.step} {f.rule}: {f.message}" for f in probe_of(engine).findings if f.severity != "info"]
(folder / "alarms.txt").write_text("\n".join(found))
engine.destroy()
torch.distributed.destroy_process_group()
