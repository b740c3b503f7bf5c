"""Megatron's `fsdp_dtensor` and `torch_dcp` checkpoints: PyTorch distributed checkpoints with Megatron's own sections in them.

Keys: `model.module.<name>`, `optimizer.state.module.module.<name>.exp_avg`, `rng_state.(pp, tp).0.<generator>`, `args`,
`iteration`, `opt_param_scheduler.…`. Layers and experts carry global numbers.
A gated fc1 stands as `…_w` (gate) and `…_v` (up).
Source: `megatron.training.checkpointing` and `megatron.core.transformer.fsdp_dtensor_checkpoint`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats import torch_dcp
from trainprobe.ckpt_compare.megatron import iteration_folder, model_config, namespace, plain_sections, rng_digests
from trainprobe.ckpt_compare.optimizer_names import one_or_all, scalar
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, gather
from trainprobe.ckpt_compare.plain_state import flat
from trainprobe.ckpt_compare.storage.mapped import mapping
from trainprobe.errors import FormatError

_WRAPPERS = r"(?:module\.)*"
_WEIGHT = re.compile(rf"model\d*\.{_WRAPPERS}(?P<name>.+)")
_STATE = re.compile(
    rf"optimizer\.state\.{_WRAPPERS}(?P<name>.+)\.(?P<slot>exp_avg|exp_avg_sq|momentum_buffer|master_param|step)"
)
_RNG = re.compile(r"rng_state\.\((?P<pp>\d+), (?P<tp>\d+)\)\.\d+\.(?P<name>.+)")
_SLOTS = {"master_param": "master"}


def sniff(path: Path) -> bool:
    """A folder with `.metadata` alone, in which Megatron's version number and layers stand, or one that points to such."""
    folder = iteration_folder(path)
    if folder is None or not torch_dcp.sniff(folder):
        return False
    keys = mapping(str(folder / ".metadata"))
    return all(keys.find(word) >= 0 for word in (b"checkpoint_version", b"decoder.layers."))


def open(path: Path) -> Checkpoint:
    """Open the checkpoint: weights, moments by parameter, generators, arguments, iteration and scheduler."""
    folder = iteration_folder(path) or path
    stored = torch_dcp.read_metadata(folder)
    problems = list(stored.problems)
    tensors: list[LogicalTensor] = []
    steps: set[float] = set()
    rng: dict[str, dict[str, Any]] = {}
    for key, tensor in stored.tensors.items():
        if (state := _STATE.fullmatch(key)) is not None:
            if state["slot"] == "step":
                steps.update(scalar(piece.source) for piece in tensor.pieces)
            else:
                slot = _SLOTS.get(state["slot"], state["slot"])
                tensors.append(LogicalTensor(state["name"], tensor.shape, tensor.pieces, slot, native=key))
        elif (weight := _WEIGHT.fullmatch(key)) is not None:
            if "_extra_state" not in key:
                tensors.append(LogicalTensor(weight["name"], tensor.shape, tensor.pieces, native=key))
        elif (at := _RNG.fullmatch(key)) is not None:
            for piece in tensor.pieces[:1]:  # none where its file is lost, which is a problem already
                rng.setdefault(f"tp {at['tp']} pp {at['pp']}", {})[at["name"]] = piece.source.load()
    plain = _objects(stored, rng, problems)
    config, layout = model_config(plain.get("args"))
    state = plain_sections({k: plain[k] for k in ("iteration", "args", "opt_param_scheduler") if k in plain})
    state["rng"] = {k: v for rank, states in rng.items() for k, v in rng_digests(rank, states).items()}
    if steps:
        state["optimizer"] = {"step": one_or_all(steps)}
    return Checkpoint(str(path), "megatron_fsdp", gather(tensors), "megatron", layout, config, state, tuple(problems))


def _objects(stored: torch_dcp.Stored, rng: dict[str, dict[str, Any]], problems: list[Problem]) -> dict[str, Any]:
    """Read what is no tensor: arguments, iteration, scheduler (as one mapping), states of generators."""
    plain: dict[str, Any] = {}
    for key, place in stored.objects.items():
        at = _RNG.fullmatch(key)
        section, _, rest = key.partition(".")
        if at is None and section not in ("args", "iteration", "opt_param_scheduler"):
            continue
        try:
            value = torch_dcp.load_object(place)
        except FormatError as error:
            problems.append(Problem(key, str(error)))
            continue
        if at is not None:
            rng.setdefault(f"tp {at['tp']} pp {at['pp']}", {})[at["name"]] = value
        elif rest:
            plain.setdefault(section, {}).update(flat({rest: value}))
        else:
            plain[key] = namespace(value) if key == "args" else value
    return plain
