"""A single file by torch.save: a state dict, or a dict with a model, an optimizer and whatever else a script kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trainprobe.ckpt_compare.optimizer_names import is_array, name_states, optimizer_states
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, gather, whole
from trainprobe.ckpt_compare.plain_state import digest, flat, plain
from trainprobe.ckpt_compare.saved_objects import as_state_dicts
from trainprobe.ckpt_compare.state import EXTRA
from trainprobe.ckpt_compare.storage import remarks, torch_archive
from trainprobe.ckpt_compare.storage.inert_objects import PickledBytes, Thing, runs_code
from trainprobe.ckpt_compare.storage.mapped import HeldArray, read_text
from trainprobe.engine.compare.number_formats import number_format
from trainprobe.errors import FormatError

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
    return replace(read(path, torch_archive.load(str(path)), "plain_torch"), config=_config_beside(path))


def _config_beside(path: Path) -> dict[str, Any]:
    """Return the heads from the configuration that LitGPT writes beside its weights; nothing where there is none."""
    file = path.parent / "model_config.yaml"
    if not file.is_file():
        return {}
    try:
        held: Any = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise FormatError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    numbers: dict[str, int] = {str(k): v for k, v in held.items() if type(v) is int and v > 0} if isinstance(held, dict) else {}
    heads = numbers.get("n_head")
    if heads is None:
        return {}
    head_dim = numbers.get("head_size") or numbers.get("n_embd", 0) // heads
    return {"heads": heads, "groups": numbers.get("n_query_groups", heads), "head_dim": head_dim or None}


def read(path: Path, content: Any, name: str) -> Checkpoint:
    """Build the checkpoint from what a torch file holds.

    Tensors of a second model beside the first (an average of its weights, a discriminator) are called `NAME (SECTION)`.
    """
    notes: list[str] = []
    is_dict, content = isinstance(content, Mapping), as_state_dicts(content)
    sections: Mapping[str, Any] = content if is_dict else {}
    model_key = next((k for k in MODEL_KEYS if isinstance(sections.get(k), Mapping)), None)
    model = sections[model_key] if model_key is not None else content
    state: dict[str, dict[str, Any]] = {"weights": values} if (values := values_of(model)) else {}
    models = [_weights(path, model)]
    tensors: list[LogicalTensor] = []
    if model_key is not None:
        more = [k for k, v in sections.items() if k != model_key and _is_model(k, v)]
        models += [_weights(path, sections[key], f" ({key})") for key in more]
        of_optimizers = [k for k, v in sections.items() if k in OPTIMIZER_KEYS or _is_optimizer(v)]
        shapes = _shapes_of(models)
        for key in of_optimizers:
            tensors += _optimizer(path, key, sections[key], shapes, state, notes)
        _plain({k: v for k, v in sections.items() if k not in (model_key, *more, *of_optimizers)}, state)
    weights = [tensor for model in models for tensor in model]
    return Checkpoint(str(path), name, gather([*weights, *tensors]), state=state, notes=tuple(notes))


def _weights(path: Path, model: Any, mark: str = "") -> list[LogicalTensor]:
    held = arrays(model)
    names = [clean(name) for name, _ in held]
    if len(set(names)) < len(names):  # a part of the model itself is called `module`
        names = [name for name, _ in held]
    return [whole(short + mark, a, path.name, stored=name + mark) for short, (name, a) in zip(names, held, strict=True)]


def values_of(model: Any, path: str = "") -> dict[str, Any]:
    """Return name → value of the numbers, texts and bytes that stand beside tensors in the dicts of a model."""
    if not isinstance(model, Mapping):
        return {}
    found: dict[str, Any] = {}
    beside = path.endswith(f"{EXTRA}.") or any(map(is_array, model.values()))  # pyright: ignore[reportUnknownArgumentType]
    for key, value in model.items():  # pyright: ignore[reportUnknownVariableType]
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            found |= values_of(value, f"{name}.")
        elif beside and key not in ITERATION_KEYS and is_plain(value):
            found[clean(name)] = plain(value)
    return found


def is_plain(value: Any) -> bool:
    """Return whether a value beside tensors is a number, a text, bytes, or a list of numbers and texts."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(v, (bool, int, float, str)) for v in value)  # pyright: ignore[reportUnknownVariableType]
    return isinstance(value, (bool, int, float, str, bytes, PickledBytes))


def _is_model(key: str, section: Any) -> bool:
    """Return whether a section is another model: a dict of nothing but arrays, some of floats, or an average of weights."""
    if not isinstance(section, Mapping) or _is_optimizer(section) or "rng" in key or key in SCHEDULER_KEYS:
        return False
    held = [leaf for _, leaf in torch_archive.leaves(section)]
    floats = any(is_array(leaf) and leaf.format.mantissa is not None for leaf in held)
    return floats and (key in MODEL_KEYS or "ema" in key.lower().split("_") or all(is_array(leaf) for leaf in held))


def _is_optimizer(section: Any) -> bool:
    return isinstance(section, Mapping) and "state" in section and "param_groups" in section


def _shapes_of(models: list[list[LogicalTensor]]) -> list[dict[str, tuple[int, ...]]]:
    """Return name → shape of what one optimizer may have: the first model, another one, a part of the first, or all."""
    every = [{t.name: t.shape for t in model} for model in models]
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in every[0].items():
        parts.setdefault(name.partition(".")[0], {})[name] = shape
    together = {n: s for shapes in every for n, s in shapes.items()}
    return [*every, *(parts.values() if len(parts) > 1 else ()), *([together] if len(every) > 1 else ())]


def clean(name: str) -> str:
    """Return a parameter name without the parts that compile, FSDP and DDP wrappers add."""
    return _WRAPPERS.sub("", name).removeprefix("module.")


def arrays(content: Any) -> list[tuple[str, Any]]:
    """Return (dotted name, array) for every array in nested containers of weights.

    A value that holds numbers in a way that is not known here, or whose making would run code, is remarked as a fault.
    """
    found: list[tuple[str, Any]] = []
    sharded: list[tuple[str, Any]] = []
    for at, leaf in torch_archive.leaves(content):
        if is_array(leaf):
            found.append((".".join(at), leaf))
        elif isinstance(leaf, np.ndarray):
            found.append((".".join(at), HeldArray(leaf, number_format(leaf.dtype.name))))
        elif isinstance(leaf, torch_archive.ShardedTensor):
            sharded.append((".".join(at), leaf.local))
        elif isinstance(leaf, Thing) and at[-1:] != (EXTRA,):
            lament(".".join(at), leaf)
    return [*found, *sharded]


def lament(name: str, value: Thing) -> None:
    """Remark that a value among the weights is a tensor of a kind that cannot be read, if it is one."""
    if value.fault:
        return  # remarked by its reader
    if runs_code(value.name):
        remarks.fault(name, f"would be the result of {value.name}, which runs code: it is refused")
    elif any(
        is_array(leaf) or isinstance(leaf, torch_archive.Storage)
        for inner in (value.args, value.state)
        for _, leaf in torch_archive.leaves(inner)
    ):
        remarks.fault(name, f"is a {value.name}, a kind of tensor that cannot be read as numbers here")


def _optimizer(
    path: Path,
    key: str,
    content: Any,
    shapes: list[dict[str, tuple[int, ...]]],
    state: dict[str, dict[str, Any]],
    notes: list[str],
) -> list[LogicalTensor]:
    """Name the states of one optimizer, or of a list of them.

    shapes: name → shape of what one may have. What one was found to have is taken out. States that fit none keep their numbers.
    """
    found: list[LogicalTensor] = []
    for one in content if isinstance(content, (list, tuple)) else [content]:
        if not isinstance(one, Mapping) or "state" not in one:
            continue
        held = next((held for held in shapes if _named(one, held) is not None), None)
        named = None if held is None else _named(one, held)
        tensors, values = optimizer_states(one, named, held or {}, key, f"{path.name}: {key}", notes)
        mark = f" ({key})" if "optimizer" in state else ""  # each further one
        state.setdefault("optimizer", {}).update({f"{name}{mark}": value for name, value in values.items()})
        if held is not None:
            shapes.remove(held)
        found += tensors
    return found


def _named(one: Mapping[str, Any], held: Mapping[str, tuple[int, ...]]) -> dict[str, Mapping[str, Any]] | None:
    by_name = {clean(str(k)): v for k, v in one["state"].items() if isinstance(v, Mapping) and clean(str(k)) in held}
    return by_name or name_states(one, held)


def _plain(sections: Mapping[str, Any], state: dict[str, dict[str, Any]]) -> None:
    """File the rest of a training script's dict under iteration, scheduler, rng and arguments."""
    for key, value in sections.items():
        if key in ITERATION_KEYS and not isinstance(value, Mapping):
            state.setdefault("iteration", {}).update(flat({key: value}))
        elif key in SCHEDULER_KEYS:
            state.setdefault("scheduler", {}).update(flat({key: value}))
        elif "rng" in key:
            parts = value.items() if isinstance(value, Mapping) else [("state", value)]
            state.setdefault("rng", {}).update({f"{key}/{k}": digest(v) for k, v in parts})
        else:
            state.setdefault("args", {}).update(flat({key: value}))
