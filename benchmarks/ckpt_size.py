"""Checkpoints of very many small tensors: how long a comparison takes, and how much memory it needs.

    python -m benchmarks.ckpt_size --tensors 1000000 --folder /tmp/many pt safetensors sharded dcp

Writes a pair of each kind with torch, torch.distributed.checkpoint (dcp) and safetensors themselves (equal but for one element
of the last tensor), then compares them in a process of its own. Prints seconds, peak resident MiB and exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

PER_SHARD = 50_000  # tensors


def state(tensors: int, planted: bool, short: bool) -> dict[str, torch.Tensor]:
    """Return so many expert matrices [3, 5] float32; planted: the last one has another element.

    They have DeepSeek's names, which are mapped to logical ones; short: names of no family, as the header of one safetensors
    file holds at most 100 MB.
    """
    values = torch.randn(tensors, 3, 5, generator=torch.Generator().manual_seed(7))
    if planted:
        values[-1, 2, 4] += 1
    names = (f"l.{i // 512}.e.{i % 512}.w" if short else _deepseek(i) for i in range(tensors))
    found = {} if short else {"model.layers.0.self_attn.o_proj.weight": torch.ones(3, 3)}  # the family is recognised by it
    return found | {name: value.clone() for name, value in zip(names, values, strict=True)}


def _deepseek(number: int) -> str:
    expert, part = divmod(number, 3)
    layer, expert = divmod(expert, 256)
    return f"model.layers.{layer}.mlp.experts.{expert}.{('gate', 'up', 'down')[part]}_proj.weight"


def write(kind: str, folder: Path, tensors: int, planted: bool) -> Path:
    """Write one checkpoint of a kind and return its path; one that exists already is kept."""
    side = "b" if planted else "a"
    path = (
        folder
        / {"pt": f"{side}.pt", "safetensors": f"{side}.safetensors", "sharded": f"sharded_{side}", "dcp": f"dcp_{side}"}[kind]
    )
    if path.exists():
        return path
    held = state(tensors, planted, kind == "safetensors")
    if kind == "pt":
        torch.save(held, path)
    elif kind == "safetensors":
        save_file(held, path)
    elif kind == "dcp":
        dcp.save({"model": held}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    else:
        _write_shards(path, held)
    return path


def _write_shards(path: Path, held: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    parts = list(_parts(held))
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, path / name)
        index |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _parts(held: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    names = list(held)
    for start in range(0, len(names), PER_SHARD):
        yield {name: held[name] for name in names[start : start + PER_SHARD]}


def timed(a: Path, b: Path) -> tuple[float, float, float, int]:
    """Compare in a process of its own; return seconds, seconds of CPU, its peak resident MiB, and its exit code."""
    start = time.perf_counter()
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-m", "trainprobe", "ckpt-compare", str(a), str(b)])
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)


def main() -> None:
    """Write, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["pt", "safetensors", "sharded", "dcp"])
    parser.add_argument("--tensors", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for kind in given.kinds:
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # else the peak would be that of this process, which forks
            a, b = (apart.submit(write, kind, given.folder, given.tensors, planted).result() for planted in (False, True))
        seconds, cpu, peak, code = timed(a, b)
        told = f"{seconds:.1f} s, {cpu:.1f} s of CPU, {peak:.0f} MiB, exit code {code}"
        print(f"{kind}: {given.tensors:,} tensors a side, {told}", flush=True)


if __name__ == "__main__":
    main()
