"""Small pipelines of two stages under DeepSpeed, and the same layers in one process of plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.integrations.deepspeed.small_deepspeed import ACCUMULATE, CLIP, LR, MICRO, STATE, STEPS

WIDTH, WORDS = 7, 11
TIED = "tied_modules.embedding.weight"


class Block(nn.Module):
    """One layer. seed: its initial weights are those of its number."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        fill(self, f"{seed}.lin")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin(x))


class Words(nn.Module):
    """An embedding that the last layer uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WORDS, WIDTH))
        fill(self, TIED)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.weight[words]


def fill(module: nn.Module, name: str) -> None:
    made = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=made))


def scores(embedding: Words, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


def distance(scores_of: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores_of.float(), y)


def batches(index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of a data-parallel index."""
    made = torch.Generator().manual_seed(200 + index)
    drawn = torch.randint(0, WORDS, (STEPS * ACCUMULATE, 2, MICRO), generator=made)
    return [(words, following) for words, following in drawn]


def engine_with(name: str) -> Any:
    """Return an engine of two stages with tied ends. name: pipe-zeroSTAGE-DTYPE."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    stage, dtype = int(name[9]), name.split("-")[2]
    torch.manual_seed(5)
    ends = (TiedLayerSpec("embedding", Words), TiedLayerSpec("embedding", Words, forward_fn=scores))
    layers = [ends[0], *(LayerSpec(Block, i) for i in range(1, 4)), ends[1]]
    net = PipelineModule(layers, num_stages=2, loss_fn=distance, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": clip_of(stage),
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=LR), config=config)[0]


def clip_of(stage: int) -> float:
    return CLIP if stage else 0.0


def train(engine: Any, steps: slice = slice(STEPS)) -> list[torch.Tensor]:
    data = batches(engine.grid.get_data_parallel_id())
    chosen = list(range(STEPS))[steps]
    micro = iter(batch for step in chosen for batch in data[step * ACCUMULATE : (step + 1) * ACCUMULATE])
    return [engine.train_batch(data_iter=micro).detach().clone() for _ in chosen]


def plain(dp: int, clip: float) -> list[dict[str, float]]:
    """Train those layers in one process; return by step the loss and norms by "name slot"."""
    embedding, blocks = Words(), [Block(i) for i in range(1, 4)]
    layers = nn.Sequential(embedding, *blocks)
    named = {TIED: embedding.weight} | {f"{i}.lin.{n}": p for i, b in enumerate(blocks, 1) for n, p in b.lin.named_parameters()}
    optimizer, data, steps = torch.optim.AdamW(layers.parameters(), lr=LR), [batches(index) for index in range(dp)], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for own in data:
            for x, y in own[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
                loss = distance(scores(embedding, layers(x)), y) / ACCUMULATE / dp
                loss.backward()
                total += loss.item()
        told = {"loss": total} | {f"{n} value": p.norm().item() for n, p in named.items()}
        norm = nn.utils.clip_grad_norm_(layers.parameters(), clip or float("inf"))
        told |= {"grad_norm": norm.item()} if clip else {}
        told |= {f"{n} grad": grad.norm().item() for n, p in named.items() if (grad := p.grad) is not None}
        optimizer.step()
        told |= {f"{n} {slot}_after": optimizer.state[p][slot].norm().item() for n, p in named.items() for slot in STATE}
        told |= {f"{n} value_after": p.norm().item() for n, p in named.items()}
        steps.append(told)
    return steps
