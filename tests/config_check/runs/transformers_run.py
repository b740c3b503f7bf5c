"""A Hugging Face Trainer at work, once for each change: `transformers_run.py FOLDER CHANGE…`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ["ACCELERATE_USE_CPU"] = "true"
sys.path.insert(0, str(Path(__file__).parent))
from trainprobe import ConfigChecker

warnings.filterwarnings("ignore")


def train(out: Path, change: str) -> None:
    ConfigChecker.apply_patches(on_error="raise")
    import torch
    from change import seed_all
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    seed_all("")
    drop = 0.2 if change == "dropout" else 0.1
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=drop)
    torch.manual_seed(3)
    model = GPT2LMHeadModel(config)
    if change == "weight":
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight[0, 0] += 1e-3
    order = [1, 0, *range(2, 16)] if change == "order" else range(16)
    ids = torch.arange(16 * 8).view(16, 8) % 40
    data = [{"input_ids": ids[i], "labels": ids[i]} for i in order]
    arguments = TrainingArguments(
        output_dir=str(out / "hf"), use_cpu=True, max_steps=6, per_device_train_batch_size=1, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no",
        learning_rate=3e-4 if change == "lr" else 1e-4, seed=43 if change == "seed" else 42,
        train_sampling_strategy="sequential" if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__ else None,
    )  # fmt: skip
    with ConfigChecker(model, output_zip_path=out / f"{change.replace(' ', '_')}.zip", on_error="raise"):
        Trainer(model=model, args=arguments, train_dataset=data).train()


for change in sys.argv[2:]:
    train(Path(sys.argv[1]), change)
