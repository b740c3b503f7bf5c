"""Train one step of a tiny Megatron GPT, recorded op by op: `train_megatron_ops.py FOLDER LAYOUT…` (NAME or NAME!scale).

With `!scale` rank 1 multiplies the scores of one attention by another number.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.integrations.megatron import train as megatron_training


def main() -> None:
    dist = megatron_training.dist
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        name, _, fault = layout.partition("!")
        megatron_training.prepare(name)
        training = megatron_training.Training(name)
        if fault and dist.get_rank() == 1:
            model = megatron_training.bare(training.chunks[0])
            model.get_submodule("decoder.layers.1.self_attention.core_attention").softmax_scale *= 1.03
        megatron_training.dump_step(training, Path(sys.argv[1]) / layout, level="mix", summary="both")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
