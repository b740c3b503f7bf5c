"""Programs that a trainer drives: the Hugging Face Trainer, with adapters too, Lightning, DeepSpeed."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bugs.open_bench.bug import Watch
from tests.distributed.launch import free_port

PAD, EOS = 0, 1


def documents(count: int = 256, seed: int = 0) -> list[dict[str, list[int]]]:
    """Counting tokens of various lengths, each document with its end token."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        start, stride, length = (int(torch.randint(*r, (1,), generator=g)) for r in ((0, 40), (1, 4), (6, 20)))
        made.append({"input_ids": [2 + (start + stride * i) % 40 for i in range(length)] + [EOS]})
    return made


def collate(examples: list[dict[str, list[int]]], bug: str) -> dict[str, Tensor]:
    """Pad a batch, and make its labels."""
    longest = max(len(e["input_ids"]) for e in examples)
    pad = EOS if bug == "end_token_is_padding" else PAD
    tokens = torch.tensor([e["input_ids"] + [pad] * (longest - len(e["input_ids"])) for e in examples])
    real = torch.tensor([[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples])
    labels = tokens.clone()
    if bug != "padding_is_a_target":
        labels[tokens == pad] = -100
    if bug == "labels_shifted_twice":
        labels = torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], dim=1)
    return {"input_ids": tokens, "attention_mask": real, "labels": labels}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 42, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD))


def train(model: Any, watch: Watch, bug: str, **settings: Any) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=64, per_device_train_batch_size=8, learning_rate=3e-3,
            logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True, seed=40, **settings,
        )  # fmt: skip
        Trainer(
            model=model,
            args=arguments,
            train_dataset=documents(),
            data_collator=lambda examples: collate(examples, bug),
            callbacks=[watch.transformers()],
        ).train()


def causal_lm(bug: str, watch: Watch) -> None:
    torch.manual_seed(40)
    warmup = 4000 if bug == "warm_up_without_end" else 10
    train(gpt2(), watch, bug, warmup_steps=warmup, gradient_accumulation_steps=2)


def adapters(bug: str, watch: Watch) -> None:
    """A training that goes on from a saved adapter."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(41)
    base, again = gpt2(), gpt2()
    again.load_state_dict(base.state_dict())
    with tempfile.TemporaryDirectory() as saved:
        config = LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
        get_peft_model(base, config).save_pretrained(saved)
        model = PeftModel.from_pretrained(again, saved, is_trainable=bug != "adapter_loaded_frozen")
    if bug == "adapter_loaded_frozen":  # the norm that is trained beside the adapter is made trainable by hand
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "modules_to_save" in name
    train(model, watch, bug)


def fit(module: Any, data: Any, watch: Watch, **settings: Any) -> None:
    import lightning.pytorch as pl

    pl.Trainer(
        accelerator="cpu", callbacks=[watch.lightning()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    ).fit(module, data)  # fmt: skip


def regression(bug: str, watch: Watch) -> None:
    """Automatic optimization, four micro-batches a step."""
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
            if bug == "clipped_before_the_backward_pass":
                nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            if bug != "clipped_before_the_backward_pass":
                nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    torch.manual_seed(42)
    g = torch.Generator().manual_seed(42)
    batches = [torch.randn(16, 16, generator=g) for _ in range(14)]
    whole = None if bug == "tail_divided_by_all" else 12
    loader = torch.utils.data.DataLoader(batches, batch_size=None, shuffle=True)
    settings = {"max_steps": 64, "max_epochs": -1, "accumulate_grad_batches": 4}
    fit(Regression(), loader, watch, **settings, limit_train_batches=whole)


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, create_graph: bool) -> Tensor:
    """WGAN-GP's: the critic's difference and ten times its gradient penalty."""
    mixed = torch.rand(len(real), 1)
    points = (mixed * real + (1 - mixed) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=create_graph)
    return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def wgan(bug: str, watch: Watch) -> None:
    """Manual optimization of two networks, each with a schedule."""
    import lightning.pytorch as pl

    class Wasserstein(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
            self.critic = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))

        def training_step(self, real: Any, index: int) -> None:
            first, second = self.optimizers()
            fake = self.generator(torch.randn(len(real), 4))
            self.update(second, critic_loss(self.critic, real, fake.detach(), bug != "penalty_without_graph"))
            self.update(first, -self.critic(self.generator(torch.randn(len(real), 4))).mean())
            if bug != "schedulers_not_stepped":
                for scheduler in self.lr_schedulers():
                    scheduler.step()

        def update(self, optimizer: Any, loss: Tensor) -> None:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self) -> Any:
            made = [torch.optim.Adam(n.parameters(), lr=1e-3, betas=(0.0, 0.9)) for n in (self.generator, self.critic)]
            ramps = [torch.optim.lr_scheduler.LinearLR(o, 0.05, total_iters=20) for o in made]
            return made, ramps

    torch.manual_seed(43)
    points = torch.randn(1024, 2, generator=torch.Generator().manual_seed(43)) * torch.tensor([1.0, 0.2]) + 1
    fit(Wasserstein(), torch.utils.data.DataLoader(points, batch_size=32, shuffle=True), watch, max_epochs=2)


def engine(bug: str, watch: Watch) -> None:
    """DeepSpeed's engine with four micro-batches a step."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(launched)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(44)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    config = {
        "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 0},
    }  # fmt: skip
    made, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    made = watch.deepspeed(made)
    g = torch.Generator().manual_seed(44)
    for _ in range(4 * 60):
        x = torch.randn(16, 16, generator=g)
        loss = functional.cross_entropy(made(x), x[:, :4].argmax(1))
        made.backward(loss / 4 if bug == "divided_by_the_engine_too" else loss)
        made.step()
    made.destroy()
