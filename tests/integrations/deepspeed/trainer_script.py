"""A Trainer of Hugging Face with DeepSpeed beneath, which knows nothing of the probe."""

from pathlib import Path

import deepspeed

from tests.integrations.transformers.small_trainer import CLIP, train

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
config = {
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    **dict.fromkeys(AUTO, "auto"),
}
train(Path("trained"), [], accumulate=2, clip=CLIP, ranks=1, drop=0.0, deepspeed=config, optim="adamw_torch")
