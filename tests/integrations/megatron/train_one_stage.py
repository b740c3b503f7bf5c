"""Two stages of a pipeline under a plan that names a layer of the second: `train_one_stage.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
import torch.distributed as dist  # noqa: E402
import train as trained  # noqa: E402

from trainprobe.integrations import megatron  # noqa: E402

LAYER = "decoder.layers.3.mlp"  # of four, two a stage

dist.init_process_group("gloo")
folder = Path(sys.argv[1])
training = trained.Training("pp2")
training.a.steps = 2
monitor = {"gradients": {"names": [f"{LAYER}.**"]}, "activations": {"names": ["no.such.module"]}}
plan = {"level": "L0", "step": [1], "modules": [LAYER], "output": str(folder / "out"), "on_error": "raise", "monitor": monitor}
with megatron.attach(training.chunks, training.optimizer, plan) as probe:
    training.run(lambda moment, step: None)
told = [(f.severity, f.message) for f in probe.findings if f.rule == "plan"]
(folder / f"told.{dist.get_rank()}.json").write_text(json.dumps(told))
dist.destroy_process_group()
