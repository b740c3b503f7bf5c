"""Megatron `torch_dist` and zarr checkpoints: sharded tensors beside `metadata.json` and `common.pt`, names free of any layout.

Layers of one kind are stacked on a first axis (`decoder.layers.mlp.linear_fc1.weight` [layers, …]) and experts on the next
one; both are taken apart here, so that the names are those of the per-rank format with global numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats import torch_dcp
from trainprobe.ckpt_compare.megatron import iteration_folder, model_config, plain_sections, rng_digests
from trainprobe.ckpt_compare.megatron_dp_reshardable import bucket_states, is_bucket
from trainprobe.ckpt_compare.megatron_zarr import read_zarr_folder
from trainprobe.ckpt_compare.optimizer_names import one_or_all
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, gather
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.ckpt_compare.storage.mapped import read_json, read_text
from trainprobe.ckpt_compare.transforms import unstack
from trainprobe.errors import FormatError

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>\w+?)\.(?P<name>.+)")
_STACK = re.compile(r"(?P<head>.*\blayers)\.(?P<tail>(?!\d).+)")
_EXPERTS = re.compile(r"(?P<head>.*\bmlp\.experts)\.experts\.(?P<tail>linear_fc\d\.\w+)")
_MASTER = {"fp32_param": "master", "param": "master"}


def sniff(path: Path) -> bool:
    """A folder with `metadata.json` that names a sharded backend, or one that points to such an iteration."""
    folder = iteration_folder(path)
    return (
        folder is not None and (folder / "metadata.json").is_file() and "sharded_backend" in read_text(folder / "metadata.json")
    )


def open(path: Path) -> Checkpoint:
    """Open a torch_dist checkpoint; raise FormatError for a backend that cannot be read here."""
    folder = iteration_folder(path) or path
    backend = read_json(folder / "metadata.json")["sharded_backend"]
    if backend not in ("torch_dist", "zarr"):
        raise FormatError(f"{folder}: sharded backend {backend!r} is not known; torch_dist and zarr are")
    stored = read_zarr_folder(folder) if backend == "zarr" else torch_dcp.read_metadata(folder)
    common = torch_archive.load(str(folder / "common.pt")) if (folder / "common.pt").exists() else {}
    state, problems = plain_sections(common), list(stored.problems)
    config, layout = model_config(common.get("args"))
    named = [t for key, tensor in stored.tensors.items() for t in _named(key, tensor)]
    weights = [t for t in named if not t.slot]
    named += bucket_states(stored.tensors, weights, config, layout, problems)
    tensors = gather(named)
    rng = _rng(stored, problems)
    if rng:
        state["rng"] = rng
    steps = sorted({step for part in (common.get("optimizer"), *_optimizers(stored, problems)) for step in _steps(part)})
    if steps:
        state["optimizer"] = {"step": one_or_all(steps)}
    return Checkpoint(str(path), "megatron_dist", tensors, "megatron", layout, config, state, tuple(problems))


def _named(key: str, tensor: LogicalTensor) -> Iterator[LogicalTensor]:
    """Give the tensors that one stored tensor stacks, under their names with numbers."""
    match = _STATE.fullmatch(key)
    name, slot = (match["name"], _MASTER.get(match["slot"], match["slot"])) if match is not None else (key, "")
    if not tensor.shape or "_extra_state" in name or is_bucket(key):
        return
    stack = _STACK.fullmatch(name)
    layers = [(name, tensor)]
    if stack is not None:
        layers = [(f"{stack['head']}.{i}.{stack['tail']}", t) for i, t in enumerate(unstack(tensor))]
    for layer, part in layers:
        experts = _EXPERTS.fullmatch(layer)
        if experts is None:
            yield replace(part, name=layer, slot=slot, native=key)
            continue
        for e, expert in enumerate(unstack(part)):
            yield replace(expert, name=f"{experts['head']}.local_experts.{e}.{experts['tail']}", slot=slot, native=key)


def _rng(stored: torch_dcp.Stored, problems: list[Problem]) -> dict[str, Any]:
    """Return `tp T pp P/generator` → digest of its state; Megatron shards these objects by (pp, tp)."""
    found: dict[str, Any] = {}
    for key, place in stored.objects.items():
        match = re.fullmatch(r"rng_state/shard_(\d+)\.(\d+)_.*", key)
        if match is None:
            continue
        try:
            states = torch_dcp.load_object(place)
        except FormatError as error:
            problems.append(Problem(key, str(error)))
            continue
        found |= rng_digests(f"tp {match[2]} pp {match[1]}", states)
    return found


def _optimizers(stored: torch_dcp.Stored, problems: list[Problem]) -> Iterator[Any]:
    """Yield what the optimizers of single model-parallel ranks stored beside their tensors: groups and step counts."""
    for key, place in stored.objects.items():
        if re.search(r"\.dp_group_idx_\d+\.optimizer/", key):
            try:
                yield torch_dcp.load_object(place)
            except FormatError as error:
                problems.append(Problem(key, str(error)))


def _steps(optimizer: Any) -> Iterator[float]:
    for path, value in torch_archive.leaves(optimizer or {}):
        if path[-1] in ("common_step", "step"):
            yield float(value.load().reshape(-1)[0] if hasattr(value, "load") else value)
