"""One rank of a trainer that FSDP2 shards: pushes to an engine of its own, and says what arrived."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import trainprobe


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.self_attn.add_module(name, torch.nn.Linear(8, 6 if name == "v_proj" else 8, bias=name == "q_proj"))


def main(fault: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, engine = torch.nn.Module(), torch.nn.Module()
    model.layers, engine.layers = (torch.nn.ModuleList([Layer(), Layer()]) for _ in range(2))
    fully_shard(model)

    def everybody(own: dict) -> list:
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return found

    for version in (1, 2):
        with trainprobe.weight_sync(model, version, gather=everybody) as sync, torch.no_grad():
            for (name, p), q in zip(model.named_parameters(), engine.parameters(), strict=True):
                p.mul_(1.5)
                whole = p.full_tensor()
                if (fault, version, name) != ("stale", 2, "layers.1.self_attn.v_proj.weight"):
                    q.copy_(whole)
    answer = sync.received(engine)
    print(answer.verdict.code, answer.verdict.sentence)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
