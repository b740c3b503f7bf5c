"""One rank that gathers words, and fails where a collective that has ended still holds its tensors.

gather_words.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from trainprobe.engine.capture.gathering import gathering

dist.init_process_group("gloo")
rank, all_gather = int(os.environ["RANK"]), dist.all_gather
kept: list[torch.Tensor] = []


def keeping(received: list[torch.Tensor], mine: torch.Tensor) -> None:
    kept[:] = [mine, *received]
    all_gather(received, mine)


dist.all_gather = keeping
gather = gathering()
for step in range(500):
    told = gather.gather([rank, step, 2**63 + rank])
    assert [words.tolist() for words in told] == [[r, step, 2**63 + r] for r in range(dist.get_world_size())]
    assert [tensor._use_count() for tensor in kept] == [1] * len(kept), f"step {step}: a thread of gloo holds on to a tensor"
dist.destroy_process_group()
