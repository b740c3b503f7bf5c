"""A single file by torch.save: a state dict, or a dict with a model, an optimizer and whatever else a script kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.optimizer_names import is_array, name_states, one_or_all, state_tensors
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, gather, whole
from trainprobe.ckpt_compare.plain_state import digest, flat
from trainprobe.ckpt_compare.storage import torch_archive

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "weights", "model_state", "ema")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states", "optim_state_dict", "opt")
SCHEDULER_KEYS = ("scheduler", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict", "scheduler_state_dict")
LIGHTNING = b"pytorch-lightning_version"  # a key in each file that Lightning writes
ITERATION_KEYS = ("iteration", "step", "global_step", "epoch", "iter", "steps")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")


def sniff(path: Path) -> bool:
    """A file that torch.save wrote, unless Lightning did."""
    if not path.is_file() or path.suffix == ".safetensors" or not torch_archive.is_torch_file(str(path)):
        return False
    return not torch_archive.mentions(str(path), LIGHTNING)


def open(path: Path) -> Checkpoint:
    """Open a torch file: weights under their names, the optimizer's states under those of their parameters."""
    return read(path, torch_archive.load(str(path)), "plain_torch")


def read(path: Path, content: Any, name: str) -> Checkpoint:
    """Build the checkpoint from what a torch file holds."""
    problems: list[Problem] = []
    sections: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    model_key = next((k for k in MODEL_KEYS if isinstance(sections.get(k), Mapping)), None)
    model = sections[model_key] if model_key is not None else content
    weights = [whole(clean(n), a, f"{path.name}: {n}") for n, a in arrays(model)]
    shapes = {t.name: t.shape for t in weights}
    state: dict[str, dict[str, Any]] = {}
    tensors = list(weights)
    for key in OPTIMIZER_KEYS if model_key is not None else ():
        tensors += _optimizer(path, key, sections.get(key), shapes, state, problems)
    if model_key is not None:
        _plain(sections, state)
    return Checkpoint(str(path), name, gather(tensors), state=state, problems=tuple(problems))


def clean(name: str) -> str:
    """Return a parameter name without the parts that compile, FSDP and DDP wrappers add."""
    return _WRAPPERS.sub("", name).removeprefix("module.")


def arrays(content: Any) -> list[tuple[str, Any]]:
    """Return (dotted name, array) for every array in nested containers."""
    found = [(".".join(at), leaf) for at, leaf in torch_archive.leaves(content) if is_array(leaf)]
    sharded = [".".join(at) for at, leaf in torch_archive.leaves(content) if isinstance(leaf, torch_archive.ShardedTensor)]
    return found if not sharded else [*found, *_local_shards(content)]


def _local_shards(content: Any) -> list[tuple[str, Any]]:
    return [
        (".".join(at), leaf.local)
        for at, leaf in torch_archive.leaves(content)
        if isinstance(leaf, torch_archive.ShardedTensor)
    ]


def _optimizer(
    path: Path, key: str, content: Any, shapes: Mapping[str, Any], state: dict[str, dict[str, Any]], problems: list[Problem]
) -> list[LogicalTensor]:
    """Name the states of one optimizer, or of a list of them."""
    found: list[LogicalTensor] = []
    steps: list[float] = []
    for one in content if isinstance(content, (list, tuple)) else [content]:
        if not isinstance(one, Mapping) or "state" not in one:
            continue
        by_name = {clean(str(k)): v for k, v in one["state"].items() if isinstance(v, Mapping) and clean(str(k)) in shapes}
        named = by_name or name_states(one, shapes)
        if named is None:
            problems.append(
                Problem(
                    f"{path}: {key}", "optimizer states are numbered in an order that fits no usual grouping of the parameters"
                )
            )
            continue
        tensors, counts = state_tensors(named, f"{path.name}: {key}")
        found += tensors
        steps += counts
    if steps:
        state["optimizer"] = {"step": one_or_all(sorted(set(steps)))}
    return found


def _plain(sections: Mapping[str, Any], state: dict[str, dict[str, Any]]) -> None:
    """File the rest of a training script's dict under iteration, scheduler, rng and arguments."""
    done = {*MODEL_KEYS, *OPTIMIZER_KEYS}
    for key, value in sections.items():
        if key in done:
            continue
        if key in ITERATION_KEYS and not isinstance(value, Mapping):
            state.setdefault("iteration", {}).update(flat({key: value}))
        elif key in SCHEDULER_KEYS:
            state.setdefault("scheduler", {}).update(flat({key: value}))
        elif "rng" in key:
            parts = value.items() if isinstance(value, Mapping) else [("state", value)]
            state.setdefault("rng", {}).update({f"{key}/{k}": digest(v) for k, v in parts})
        else:
            state.setdefault("args", {}).update(flat({key: value}))
