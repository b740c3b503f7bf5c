"""One process of DeepSpeed under TrainerMon: `train_trainer_mon.py FOLDER`, which holds monitor.json."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
import deepspeed
import torch

from tests.integrations.deepspeed import small_deepspeed as small
from trainprobe.pytorch import TrainerMon

STEPS = 2

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
deepspeed.init_distributed()
os.environ["MONITOR_OUTPUT_DIR"] = str(Path(sys.argv[1]) / "out")
engine = small.engine_with(2)
monitor = TrainerMon(str(Path(sys.argv[1]) / "monitor.json"), params_have_main_grad=False)
monitor.set_monitor(engine, grad_acc_steps=small.ACCUMULATE, optimizer=engine.optimizer)
small.train(engine, small.batches(0, STEPS * small.ACCUMULATE))
monitor.close()
torch.distributed.destroy_process_group()
