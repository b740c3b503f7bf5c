"""One rank of an FSDP2 training whose last tokens never occur: train_rows.py FOLDER. One of its layers is never used, too.

The last rank holds the rows of the embedding that get no gradient. Writes FOLDER/RANK.json: the names that `dead` found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import trainprobe


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.off = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mlp(self.embed(tokens)).relu()
        return self.head(x + 0.0 * self.off(x))


def main(folder: Path) -> None:
    """Train five steps of tokens below 12 of 32."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = {"output": str(folder / "run"), "sinks": ["parquet"], "monitor": {"rules": {"dead": {"patience": 3}}}}
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        for step in range(5):
            with probe.step(step):
                tokens = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(step + 100 * dist.get_rank()))
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps([f.names for f in probe.findings if f.rule == "dead"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
