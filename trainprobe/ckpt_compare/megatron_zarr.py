"""Megatron's zarr backend: each sharded tensor a folder with a zarr array, each sharded object a folder of `shard_*.pt` files.

Source: `megatron.core.dist_checkpointing.strategies.zarr` of megatron-core 0.12, the last with this backend.
"""

from __future__ import annotations

import urllib.parse
from pathlib import Path

from trainprobe.ckpt_compare.formats.torch_dcp import Stored
from trainprobe.ckpt_compare.pieces import LogicalTensor, Problem
from trainprobe.ckpt_compare.storage.zarr_array import read_zarr
from trainprobe.errors import FormatError


def read_zarr_folder(folder: Path) -> Stored:
    """Read the structure of a zarr checkpoint, as `torch_dcp.read_metadata` does of a PyTorch one."""
    tensors: dict[str, LogicalTensor] = {}
    objects: dict[str, tuple[str, int, int]] = {}
    problems: list[Problem] = []
    for sub in sorted(p for p in folder.iterdir() if p.is_dir()):
        key = urllib.parse.unquote(sub.name)
        if (sub / ".zarray").is_file():
            try:
                tensors[key] = read_zarr(sub, key, problems)
            except FormatError as error:
                problems.append(Problem(str(sub), str(error)))
        for file in sorted(sub.glob("shard_*.pt")):
            objects[f"{key}/{file.stem}"] = (str(file), 0, file.stat().st_size)
    return Stored(tensors, objects, tuple(problems))
