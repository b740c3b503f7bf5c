"""A small training as people write them: it captures itself, and each planted difference is one edit of these files."""

from trainprobe import ConfigChecker

ConfigChecker.apply_patches()

import argparse
import logging
import os
import random

import numpy as np
import torch
from data import Lines, collate, seed_worker
from loss import token_loss
from model import Model
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

log = logging.getLogger("train")


def seed_everything():
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    torch.cuda.manual_seed_all(14)


def make_loader():
    generator = torch.Generator()
    generator.manual_seed(5)
    return DataLoader(
        Lines("corpus.txt"),
        batch_size=4,
        shuffle=True,
        drop_last=False,
        num_workers=0,
        generator=generator,
        worker_init_fn=seed_worker,
        collate_fn=collate,
    )


def make_optimizer(model):
    plain = [p for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n]
    decayed = [p for n, p in model.named_parameters() if not (n.endswith("bias") or "norm" in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, amsgrad=False)


def prepare(model):
    """What is done to the model before it trains."""
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-name", default="run")
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    seed_everything()
    model = Model()
    model = prepare(model)
    optimizer = make_optimizer(model)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loader = make_loader()
    checker = ConfigChecker(model, output_zip_path=os.path.join(args.output_dir, "pack.zip"))
    model.train()
    done = 0
    for epoch in range(2):
        for batch in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
                loss = token_loss(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])
            scaler.scale(loss).backward()
            done += 1
            if done % 1 == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
    checker.close()
    print("trained", args.run_name, done)


if __name__ == "__main__":
    main()
