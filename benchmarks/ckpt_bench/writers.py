"""Layouts that the frameworks write themselves, from a model that was loaded from a planted state."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.ckpt_bench.models import State

WRITERS = ("shards", "bfloat16", "modules", "deepspeed", "float16", "shared.pt", "dcp")
LOW = ("bfloat16", "float16")  # equal within rounding at best


def rewrite(layout: str, state: State, source: Path, path: Path) -> bool:
    """Write a state in a layout; return False where transformers does not load it as it is (a lost tensor, another shape)."""
    model = _loaded(state, source, path.with_name(f"{path.name}-planted"))
    if model is None:
        return False
    if layout == "shards":
        model.save_pretrained(path, max_shard_size="40KB")
    elif layout in LOW:
        model.to(getattr(torch, layout)).save_pretrained(path)
    elif layout == "modules":  # the names that transformers 5 gives its modules: experts stacked, one file
        model.save_pretrained(path, save_original_format=False)
    elif layout == "deepspeed":
        engine(model, 1).save_checkpoint(str(path), tag="global_step0")
    elif layout == "shared.pt":  # all names of a parameter that is used twice, over one storage
        path.mkdir()
        torch.save(model.state_dict(), path / "pytorch_model.bin")
        shutil.copy(source / "config.json", path)
    else:
        dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return True


def _loaded(state: State, source: Path, folder: Path) -> Any:
    import transformers

    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    try:
        model, told = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    except RuntimeError:  # another shape
        return None
    return None if told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"] else model


def engine(model: Any, stage: int) -> Any:
    """Return DeepSpeed's engine of a model on one CPU rank, with AdamW."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu",
                   "LOCAL_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    os.environ.setdefault("MASTER_PORT", "29631")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    asked = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "steps_per_print": 10**9}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=asked)[0]


def lose_shard(folder: Path) -> str:
    """Delete the second shard of a folder and return its name."""
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    return shard.name
