"""One process of Megatron under the plan FOLDER/plan.yaml; between the steps 2 and 3 somebody writes to a weight."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train as trained  # noqa: E402

from trainprobe.integrations import megatron  # noqa: E402

STEPS, BEFORE = 5, 3

dist.init_process_group("gloo")
training = trained.Training("alone")
training.a.steps = STEPS
(weight,) = (p for n, p in training.chunks[0].named_parameters() if n.endswith("decoder.layers.1.mlp.linear_fc2.weight"))


def on_step(moment: str, step: int) -> None:
    if (moment, step) == ("after_opt", BEFORE - 1):
        with torch.no_grad():
            weight.view(-1)[0] += 0.1


with megatron.attach(training.chunks, training.optimizer, Path(sys.argv[1]) / "plan.yaml"):
    training.run(on_step)
dist.destroy_process_group()
