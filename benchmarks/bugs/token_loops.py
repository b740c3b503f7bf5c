"""Healthy loops of one process: an encoder-decoder, experts, a scaled loss, a policy; two are restarted on the way."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.bugs.loops import Batch, Loop, Scaled, counting, images
from benchmarks.bugs.modern_loops import VOCABULARY, WIDTH, Attention, Block
from benchmarks.bugs.precise_loops import IGNORED
from benchmarks.bugs.unseen import Masters


class Seq2Seq(nn.Module):
    """An encoder and a decoder of a block each; one table embeds both languages and is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.encoder, self.decoder = Block(), Block(causal=True, crossed=True)
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens [batch, time] of both to logits [batch, time, vocabulary]; source 0 is padding."""
        padding = source == 0
        memory = self.encoder(self.table(source) + self.position(torch.arange(source.shape[1])), padding=padding)
        x = self.table(target) + self.position(torch.arange(target.shape[1]))
        return self.head(self.ln(self.decoder(x, memory, padding)))


class Translator(Loop):
    """An encoder-decoder on ragged pairs under Adafactor; the loss is the mean over the real tokens of a step."""

    micro = 2

    def build(self) -> nn.Module:
        """Make the model."""
        return Seq2Seq()

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.Adafactor(self.model.parameters(), lr=1e-2)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw all pairs of a step with the first, so that its real tokens can be counted."""
        if micro == 0:
            self.drawn = [self.pair() for _ in range(self.micro)]
            self.real = sum(int((y != IGNORED).sum()) for _, y in self.drawn)
            self.total = torch.zeros(())
        return self.drawn[micro]

    def pair(self) -> Batch:
        """The source counts on from one to eight tokens; the target says it backwards, and begins with a zero."""
        x, _ = counting(self.data, time=8, vocabulary=VOCABULARY - 1)
        lengths = torch.randint(2, 9, (len(x), 1), generator=self.data)
        padding = torch.arange(8) >= lengths
        return (x + 1).masked_fill(padding, 0), (x + 1).masked_fill(padding, IGNORED).flip(1)

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Show the decoder what comes before each token."""
        target = x.flip(1)
        return self.called(x, functional.pad(target[:, :-1], (1, 0)))

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return this micro-batch's sum over the mean number of real tokens."""
        total = functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=IGNORED)
        self.total = self.total + total.detach()
        return total * self.micro / self.counted(step, y)

    def counted(self, step: int, y: Tensor) -> float:
        """Return what the sum of a step is divided by."""
        return self.real

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note the mean over real tokens."""
        super().report(step, self.total / self.real, norm)


class Restarted(Loop):
    """A training that is saved behind a step, made anew from another seed, and loaded, under a new probe.

    restarts: the first step of the new process. parts: what is saved.
    """

    begins, restarts = 7, 5
    parts = ("model", "optimizer", "scheduler")

    def after(self, step: int) -> None:
        """Restart once."""
        if step == self.restarts - 1:
            self.restart({name: getattr(self, name).state_dict() for name in self.parts} | {"random": torch.get_rng_state()})

    def load(self, saved: dict[str, Any]) -> None:
        """Bring everything back."""
        super().load({name: saved[name] for name in self.parts})
        torch.set_rng_state(saved["random"])


class Mixture(nn.Module):
    """Four experts; a token takes the two with the highest share and balance: Wang et al. 2024, arXiv 2408.15664."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH)) for _ in range(4))
        self.register_buffer("balance", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., width] to the same, the loss that balances the router, and how many tokens each expert got."""
        noise = self.noise(x) if self.training else 0.0
        shares = (self.router(x) + noise).softmax(-1)
        chosen = torch.zeros_like(shares).scatter(-1, (shares + self.balance).topk(2).indices, 1.0)
        weights = shares * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.stack([expert(x) for expert in self.experts], -1) @ weights[..., None]
        load = chosen.flatten(0, -2).mean(0)
        return out[..., 0], 4 * (self.mean_shares(shares) * load).sum(), load

    def noise(self, x: Tensor) -> Tensor:
        """Draw what shakes the router."""
        return 0.1 * torch.randn(*x.shape[:-1], 4)

    def mean_shares(self, shares: Tensor) -> Tensor:
        """[..., experts] to [experts]."""
        return shares.flatten(0, -2).mean(0)


class RoutedBlock(nn.Module):
    """Attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.own, self.ln_moe, self.moe = nn.LayerNorm(WIDTH), Attention(causal=True), nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, time, width] to the same, and what the experts tell."""
        x = x + self.own(self.ln(x))
        out, auxiliary, load = self.moe(self.ln_moe(x))
        return x + out, auxiliary, load


class RoutedModel(nn.Module):
    """Two blocks that run again in the backward pass, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(2))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Tokens [batch, time] to logits [batch, time, vocabulary], the balancing loss and the loads."""
        x = self.table(tokens) + self.position(torch.arange(tokens.shape[1]))
        auxiliary, loads = torch.zeros(()), []
        for block in self.blocks:
            x, one, load = checkpoint(block, x, use_reentrant=False)
            auxiliary = auxiliary + one
            loads.append(load.detach())
        return self.head(self.ln(x)), auxiliary, loads


class Routed(Restarted):
    """A language model of experts under a fused AdamW; the balance of the experts is moved after each update."""

    def build(self) -> nn.Module:
        """Make the model."""
        return RoutedModel()

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def loss(self, step: int, out: Any, y: Tensor) -> Tensor:
        """Add the balancing loss."""
        logits, auxiliary, self.loads = out
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.02 * auxiliary

    def update(self, step: int) -> None:
        """Step, then move the balance."""
        super().update(step)
        for block, load in zip(self.model.blocks, self.loads, strict=True):
            block.moe.balance.add_((load.mean() - load).sign(), alpha=0.01)


class ScaledTwice(Restarted, Scaled):
    """Convolutions with group norms in float16; a scaler, two micro-batches, a restart that brings the scale back."""

    micro = 2
    parts = ("model", "optimizer", "scheduler", "scaler")

    def build(self) -> nn.Module:
        """Make the model and its scaler."""
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
        )

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw images."""
        return images(self.data)

    def quiet(self, step: int, micro: int) -> Any:
        """Run in float16 where that is safe."""
        return torch.autocast("cpu", torch.float16)

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss in float32."""
        return functional.cross_entropy(out.float(), y)


class MainGradients(Masters):
    """A bfloat16 MLP, four micro-batches whose gradients are added up in float32, and masters that the optimizer steps."""

    micro = 4

    def after_micro(self, step: int, micro: int) -> None:
        """Add up."""
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = self.added(step, master.grad, p.grad)
            p.grad = None

    def added(self, step: int, total: Tensor | None, grad: Tensor) -> Tensor:
        """Return the sum in float32."""
        return grad.float() if total is None else total + grad.float()

    def clip(self, step: int) -> Tensor | None:
        """Clip what is added up."""
        return nn.utils.clip_grad_norm_(self.masters, 0.5)


class Writer(nn.Module):
    """A causal block that tells the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(8, WIDTH), nn.Embedding(16, WIDTH)
        self.block, self.ln, self.head = Block(causal=True, dropout=0.0), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to the logarithms of the chances of each next token [batch, time, vocabulary]."""
        x = self.table(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.ln(self.block(x))).log_softmax(-1)


class Policy(Loop):
    """Group-relative policy optimisation, Shao et al. 2024, arXiv 2402.03300: an engine writes, two updates follow."""

    def build(self) -> nn.Module:
        """Make the policy, its reference and the engine that writes."""
        model = Writer()
        self.reference = copy.deepcopy(model).requires_grad_(False).eval()
        self.engine = copy.deepcopy(model).requires_grad_(False).eval()
        return model

    def batch(self, step: int, micro: int) -> Batch:
        """At each second step hand the weights to the engine, and let it write four answers to each of four prompts."""
        if step % 2 == 0:
            self.sync(step)
            tokens = torch.randint(0, 8, (4, 2), generator=self.data).repeat_interleave(4, 0)
            with torch.no_grad():
                for _ in range(6):
                    chances = self.engine(tokens)[:, -1].exp()
                    tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
                self.old = self.told(self.engine, tokens)
                self.fixed = self.told(self.reference, tokens)
            rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % 8).float()[:, 1:].mean(1).view(4, 4)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            self.rollout = tokens, advantages.flatten()[:, None]
        return self.rollout

    def sync(self, step: int) -> None:
        """Hand the weights over."""
        self.engine.load_state_dict(self.model.state_dict())

    def told(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return the logarithms of the chances of what was written [batch, 6]."""
        return model(tokens[:, :-1]).gather(-1, tokens[:, 1:, None])[:, 1:, 0]

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Tell what the policy would have said."""
        return self.told(self.called, x)

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the clipped objective and the distance from the reference."""
        ratio = (out - self.old).exp()
        gain = torch.minimum(ratio * y, ratio.clamp(0.8, 1.2) * y)
        apart = (self.fixed - out).exp() - (self.fixed - out) - 1
        return -(gain - 0.04 * apart).mean()
