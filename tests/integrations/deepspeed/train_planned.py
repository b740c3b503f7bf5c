"""One process of DeepSpeed under the plan FOLDER/plan.yaml; between the steps 3 and 4 somebody writes to a weight."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
import deepspeed
import torch

from tests.integrations.deepspeed import small_deepspeed as small
from trainprobe.integrations.deepspeed import attach

STEPS, BEFORE = 5, 3

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
deepspeed.init_distributed()
engine = attach(small.engine_with(2), Path(sys.argv[1]) / "plan.yaml")
data = small.batches(0, STEPS * small.ACCUMULATE)
small.train(engine, data[: BEFORE * small.ACCUMULATE])
with torch.no_grad():
    engine.module.fc2.weight.view(-1)[0] += 0.1
small.train(engine, data[BEFORE * small.ACCUMULATE :])
if (Path(sys.argv[1]) / "saves").exists():
    engine.save_checkpoint(str(Path(sys.argv[1]) / "saves"))
engine.destroy()
torch.distributed.destroy_process_group()
