"""Trains a small language model on each rank: `train.py KIND`, of ddp, sharded, trainer, callback, deepspeed, megatron.

The second rank has fewer targets than the first, and reads the same rows; those of deepspeed and megatron have as many.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

warnings.filterwarnings("ignore")
V = 13


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(V, 8), nn.Linear(8, 8), nn.Linear(8, V)

    def forward(self, input_ids):
        return self.head(torch.tanh(self.mix(self.embed(input_ids)).cumsum(1)))


def ddp(model):
    dist.init_process_group("gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        x = torch.randint(0, V, (4, 9))
        y = x.clone()
        y[:, 9 - 5 * dist.get_rank() :] = -100
        cross_entropy(parallel(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.randint(0, V, (4, 9))
    cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def trainer(model, rows=None, **options):
    import transformers

    config = transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=9, bos_token_id=1, eos_token_id=2)
    rows = rows or [
        {"input_ids": x, "labels": x.masked_fill(torch.arange(9) > 8 - i % 4 // 2 * 5, -100)}
        for i, x in enumerate(torch.randint(0, V, (16, 9)))
    ]
    arguments = transformers.TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, report_to="none", use_cpu=True,
        save_steps=1, disable_tqdm=True, average_tokens_across_devices=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows, **options).train()


def callback(model):
    """Rows of the second rank alone are the same; each rank writes what its callback was told."""
    from trainprobe.integrations.transformers import ProbeCallback

    rows = [{"input_ids": x, "labels": x} for x in torch.randint(0, V, (16, 9))]
    rows = [rows[i - i % 2] if i // 2 % 2 else row for i, row in enumerate(rows)]
    probe = ProbeCallback(preflight=True, output="probe", on_error="raise")
    trainer(model, rows, callbacks=[probe])
    Path(f"told{dist.get_rank()}").write_text(str(probe.preflight.report))


def deepspeed(model):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), config=config)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        x = torch.randint(0, V, (4, 9))
        engine.backward(cross_entropy(engine(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()))
        engine.step()


def megatron(model):
    tests = Path(__file__).parents[2]
    sys.path[:0] = [str(tests.parent), str(tests / "megatron_cpu"), str(tests / "integrations/megatron/trainer")]
    import megatron_on_cpu

    megatron_on_cpu.install()
    dist.init_process_group("gloo")
    from megatron.training import training

    sizes = "--hidden 32 --ffn 48 --heads 4 --groups 2 --layers 2 --seq 8 --vocab 60 --vocab-div 16 --steps 3 --micro 2"
    training.pretrain(sizes.split())


torch.manual_seed(0)
globals()[sys.argv[1]](Text())
Path("weights").write_text("never")
