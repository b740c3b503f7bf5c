"""Train one step of a tiny Megatron GPT in a plain `trainprobe.watch`: `train_megatron_watched.py FOLDER LAYOUT…`.

`LAYOUT!PARAMETER`: the last rank holds another shard of this parameter.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
import torch.distributed as dist

import trainprobe
from tests.integrations.megatron import train as megatron_training  # puts stand-ins in the place of torch's functions

PLAN = {"level": "L0", "step": [0], "summary": "both", "monitor": {"parameters": True, "gradients": True}, "console": False}


def main() -> None:
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        name, _, changed = layout.partition("!")
        megatron_training.prepare(name)
        training = megatron_training.Training(name)
        training.a.steps = 1
        if changed and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                megatron_training.bare(training.chunks[0]).get_parameter(changed).mul_(1.1)
        (model,) = training.chunks
        output = str(Path(sys.argv[1]) / layout)
        with trainprobe.watch(model, training.optimizer, output=output, on_error="raise", **PLAN) as probe, probe.step():
            training.run()
        megatron_training.fresh()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
