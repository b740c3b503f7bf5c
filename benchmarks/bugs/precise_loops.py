"""Healthy loops in the manner of current stacks: FSDP2, float16 with a scaler, compiled, adapters on a frozen model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.bugs.loops import Batch, Language, Loop, Scaled, counting

IGNORED = -100


class Sharded(Loop):
    """A GPT under fully_shard with two micro-batches, the first without communication; foreach AdamW."""

    ranks, micro = 2, 2

    def build(self) -> nn.Module:
        """Make the model."""
        return Language()

    def wrap(self) -> nn.Module:
        """Shard each block, and the rest together."""
        for block in self.model.blocks:
            fully_shard(block)
        return fully_shard(self.model)

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=True)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def quiet(self, step: int, micro: int) -> Any:
        """Reduce with the last micro-batch."""
        self.model.set_requires_gradient_sync(self.reduces(step, micro))
        return super().quiet(step, micro)

    def reduces(self, step: int, micro: int) -> bool:
        """Tell whether the gradients are reduced after this micro-batch."""
        return micro + 1 == self.micro

    def clip(self, step: int) -> Tensor | None:
        """Clip by the norm of the whole model."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).full_tensor()  # type: ignore[attr-defined]


class TwoHeads(nn.Module):
    """An MLP that tells the kind of a point and rebuilds the point."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.kind, self.point = nn.Linear(32, 5), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, 12] to [batch, 5] and [batch, 12]."""
        hidden = self.trunk(x)
        return self.kind(hidden), self.point(hidden)


class Sixteen(Scaled):
    """Two losses in float16 under autocast, scaled by a GradScaler, and clipped after unscaling."""

    def build(self) -> nn.Module:
        """Make the model and its scaler."""
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)
        return TwoHeads()

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw points of five clusters."""
        kinds = torch.randint(0, 5, (16,), generator=self.data)
        return torch.randn(16, 12, generator=self.data) + kinds[:, None], kinds

    def quiet(self, step: int, micro: int) -> Any:
        """Run in float16 where that is safe."""
        return torch.autocast("cpu", torch.float16)

    def forward(self, step: int, x: Tensor) -> Any:
        """Call the model."""
        self.seen = x
        return self.called(x)

    def loss(self, step: int, out: Any, y: Tensor) -> Tensor:
        """Add both losses."""
        kind, point = out
        self.losses = functional.cross_entropy(kind.float(), y), 0.1 * functional.mse_loss(point.float(), self.seen)
        return self.losses[0] + self.losses[1]


class SixteenWrapped(Sixteen):
    """The same on two ranks under DistributedDataParallel."""

    ranks = 2

    def wrap(self) -> nn.Module:
        """Wrap."""
        return DistributedDataParallel(self.model)


class Padded(Loop):
    """A compiled GPT on ragged sequences: the loss of a step is the mean over its real tokens, which are counted."""

    micro = 2

    def build(self) -> nn.Module:
        """Make the model."""
        return Language()

    def wrap(self) -> nn.Module:
        """Compile."""
        return torch.compile(self.model, backend="aot_eager")

    def batch(self, step: int, micro: int) -> Batch:
        """Draw all micro-batches of a step with the first, so that the real tokens of the step can be counted."""
        if micro == 0:
            self.drawn = [self.ragged() for _ in range(self.micro)]
            self.real = sum(int((y != IGNORED).sum()) for _, y in self.drawn)
        return self.drawn[micro]

    def ragged(self) -> Batch:
        """Draw four sequences of three to ten tokens, padded to ten."""
        x, y = counting(self.data)
        lengths = torch.randint(3, 11, (len(x), 1), generator=self.data)
        padding = torch.arange(x.shape[1]) >= lengths
        return x.masked_fill(padding, 0), y.masked_fill(padding, IGNORED)

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return this micro-batch's sum over the mean of real tokens in a micro-batch."""
        total = functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=IGNORED)
        return total * self.micro / self.counted(step, y)

    def counted(self, step: int, y: Tensor) -> float:
        """Return what the sum of a step is divided by."""
        return self.real

    def schedule(self, step: int) -> None:
        """Note the tokens too."""
        super().schedule(step)
        if self.probe:
            self.probe.note("tokens", self.tokens(step))

    def tokens(self, step: int) -> int:
        """Return the number of tokens of this step."""
        return sum(x.numel() for x, _ in self.drawn)


class LowRank(nn.Module):
    """A frozen linear layer and a trainable product of two narrow ones: Hu et al. 2021, arXiv 2106.09685."""

    def __init__(self, base: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)


class Rebuilt(nn.Module):
    """A pre-norm MLP block with adapters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.up, self.down = LowRank(nn.Linear(width, 32)), LowRank(nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        return x + self.down(functional.gelu(self.up(self.ln(x))))


class Tuned(nn.Module):
    """A frozen embedding, a frozen GRU, two blocks with adapters that run again in the backward pass, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.rnn = nn.Embedding(24, 16), nn.GRU(16, 16, batch_first=True)
        self.blocks, self.head = nn.ModuleList(Rebuilt(16) for _ in range(2)), nn.Linear(16, 24)
        self.reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time, vocabulary]."""
        x = self.rnn(self.wte(tokens))[0]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.head(x)


class Adapters(Loop):
    """Adapters, norms and a head under a fused AdamW with and without decay; evaluations run with merged weights."""

    def build(self) -> nn.Module:
        """Make the model and freeze what lies before the blocks and beneath the adapters."""
        model = Tuned()
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(("wte", "rnn")) and "base" not in name)
        return model

    def make_optimizer(self) -> Any:
        """Make the optimizer: norms do not decay."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if ".ln." not in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if ".ln." in name], "weight_decay": 0.0, "lr": 1e-3},
        ]
        return torch.optim.AdamW(groups, lr=5e-3, fused=True)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def after(self, step: int) -> None:
        """Evaluate with merged weights at each third step."""
        if step % 3 == 2:
            layers = [m for m in self.model.modules() if isinstance(m, LowRank)]
            kept = [layer.base.weight.clone() for layer in layers]
            self.model.eval()
            with torch.no_grad():
                for layer in layers:
                    layer.base.weight.add_(layer.up @ layer.down, alpha=layer.scale)
                    layer.scale = 0.0
                self.model(torch.arange(8)[None])
                for layer, weight in zip(layers, kept, strict=True):
                    layer.scale = 2.0
                    self.unmerge(step, layer, weight)
            self.model.train()

    def unmerge(self, step: int, layer: LowRank, weight: Tensor) -> None:
        """Put the frozen weight back."""
        layer.base.weight.copy_(weight)
