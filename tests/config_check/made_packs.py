"""Packs as a run would leave them, made by hand: what differs in a test stands in the test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.config_check.pack import Pack, RankPack
from trainprobe.config_check.pack_writer import PackWriter
from trainprobe.engine.stats import fingerprint


def entry(array: Any, *, samples: bool = False) -> dict[str, Any]:
    """Return the entry of an array in a pack."""
    a = np.asarray(array, dtype=np.float32)
    made: dict[str, Any] = {"shape": list(a.shape), "dtype": "float32", "checksum": f"{fingerprint(a):016x}"}
    made |= {
        "min": float(a.min()),
        "max": float(a.max()),
        "mean": float(a.mean()),
        "norm": float(np.linalg.norm(a.astype(np.float64))),
    }
    if samples:
        made["samples"] = [f"{fingerprint(row):016x}" for row in a]
    return made


def rank_pack(
    rank: int = 0,
    *,
    settings: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    variables: dict[str, str] | None = None,
    packages: dict[str, str] | None = None,
    batches: Sequence[Any] = ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)),
    weights: dict[str, Any] | None = None,
    calls: Sequence[dict[str, Any]] = (),
    flags: dict[str, Any] | None = None,
    states: dict[str, dict[str, str]] | None = None,
) -> RankPack:
    """Return what one rank captured."""
    sources = (
        [{"kind": "arguments", "name": "argparse", "values": settings or {}}] if not isinstance(settings, list) else settings
    )
    stacks = [[{"file": "run/model.py", "line": 31, "function": "Block.forward", "source": "x = drop(x)"}]]
    single = {
        "environment": {"variables": variables or {}, "others": {}, "withheld": []},
        "packages": {"distributions": packages or {"torch": "2.13.0"}, "platform": {}, "code": {}},
        "hyperparameters": {"sources": sources},
        "randomness": {"calls": list(calls), "stacks": stacks, "states": states or {}, "flags": flags or {}},
    }
    held = weights if weights is not None else {"fc.weight": [1.0, 2.0], "fc.bias": [0.5]}
    by_micro = {
        "dataset": {i: {"step": i, "tensors": {"x": entry(b, samples=True)}, "scalars": {}} for i, b in enumerate(batches)},
        "weights": {0: {"step": 0, "parameters": {name: {**entry(w), "kind": "parameter"} for name, w in held.items()}}},
    }
    return RankPack(rank, single, by_micro)


def pack(*ranks: RankPack, world_size: int | None = None, path: str = "pack.zip", **more: Any) -> Pack:
    """Return a pack of these ranks, of one default rank if there are none."""
    held = {r.rank: r for r in (ranks or (rank_pack(),))}
    return Pack(path, held, world_size or len(held), **more)


def compare(a: Pack | RankPack, b: Pack | RankPack) -> PackComparison:
    """Compare two packs, or packs of one rank."""
    return compare_packs(*(p if isinstance(p, Pack) else pack(p) for p in (a, b)))


def written(folder: Path, name: str = "pack.zip", **content: Any) -> Path:
    """Write a small readable pack and return its path."""
    writer = PackWriter(folder / name, captures=("environment", *content))
    writer.put("environment", {"variables": {"NCCL_ALGO": "Ring"}, "others": {}, "withheld": []})
    for capture, value in content.items():
        writer.put(capture, value)
    return writer.close()
