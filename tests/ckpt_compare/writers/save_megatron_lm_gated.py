"""Train with Megatron-LM under a plan with a save gate; the loss is NaN from step 2 on. Arguments: the plan, Megatron's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import write_megatron_lm as writer

from trainprobe.errors import StopTraining
from trainprobe.integrations import megatron


def forward(batches, gpt):
    from megatron.training import get_args

    out, loss = writer.forward(batches, gpt)
    return out * (float("nan") if get_args().curr_iteration else 1.0), loss


def main() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    megatron.attach_to_script(sys.argv.pop(1))
    writer.allow_no_device()
    writer.data.is_distributed = True
    try:
        pretrain(
            writer.data,
            writer.model,
            ModelType.encoder_or_decoder,
            forward,
            args_defaults={"tokenizer_type": "NullTokenizer"},
        )
    except StopTraining as stopped:
        print(stopped)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
