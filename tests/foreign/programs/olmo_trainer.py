"""OLMo-core's own trainer: a small transformer on tokens of its NumPy data set."""

import os
from pathlib import Path

import numpy as np
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.train_module import TransformerTrainModuleConfig

out = Path(os.environ["OUT"])
out.mkdir(exist_ok=True)
np.random.default_rng(0).integers(2, 250, 64 * 200, dtype=np.uint16).tofile(out / "tokens.npy")
prepare_training_environment(seed=0, backend=None)
tokenizer = TokenizerConfig(vocab_size=256, eos_token_id=0, pad_token_id=1)
model = TransformerConfig.llama_like(d_model=32, vocab_size=256, n_layers=2, n_heads=4).build(init_device="cpu")
module = TransformerTrainModuleConfig(
    rank_microbatch_size=2 * 64, max_sequence_length=64, optim=AdamWConfig(lr=1e-3), max_grad_norm=1.0
).build(model)
dataset = NumpyFSLDatasetConfig(
    paths=[str(out / "tokens.npy")], sequence_length=64, tokenizer=tokenizer, work_dir=str(out / "work")
).build()
loader = NumpyDataLoaderConfig(global_batch_size=4 * 64, seed=0, num_workers=0).build(dataset)
trainer = TrainerConfig(save_folder=str(out / "saved"), max_duration=Duration.steps(12), metrics_collect_interval=4).build(
    module, loader
)
trainer.fit()
teardown_training_environment()
