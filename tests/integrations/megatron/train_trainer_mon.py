"""One process of Megatron under TrainerMon: `train_trainer_mon.py FOLDER`, which holds monitor.json."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
import torch.distributed as dist  # noqa: E402
import train as trained  # noqa: E402

from trainprobe.pytorch import TrainerMon  # noqa: E402

dist.init_process_group("gloo")
folder = Path(sys.argv[1])
os.environ["MONITOR_OUTPUT_DIR"] = str(folder / "out")
training = trained.Training("alone")
training.a.steps = 2
monitor = TrainerMon(str(folder / "monitor.json"), params_have_main_grad=True, opt_ty="Megatron_DistributedOptimizer")
monitor.set_wrapped_optimizer(training.optimizer)
monitor.monitor_gnorm_with_ad(training.chunks, grad_acc_steps=2, start_iteration=0)
training.run(lambda moment, step: None)
dist.destroy_process_group()
