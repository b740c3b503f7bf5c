"""Hugging Face checkpoints: safetensors or `.bin`, in one file or in shards with an index.

The config and the files that the Trainer writes beside the model are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.adapters import drawn_from
from trainprobe.ckpt_compare.foreign_files import WEIGHTS
from trainprobe.ckpt_compare.formats.plain_torch import arrays, values_of
from trainprobe.ckpt_compare.names import in_model_order
from trainprobe.ckpt_compare.optimizer_names import name_states, optimizer_states
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, Source, gather, whole
from trainprobe.ckpt_compare.plain_state import digest, flat
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.ckpt_compare.storage.mapped import inside, read_json
from trainprobe.ckpt_compare.storage.safetensors_file import is_safetensors, read_safetensors
from trainprobe.errors import FormatError

_STEMS = ("model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin",
          "adapter_model.safetensors")  # fmt: skip
_INDEXES = tuple(f"{stem}.index.json" for stem in _STEMS)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_SINGLES = (*_STEMS, "adapter_model.bin", "pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")


def sniff(path: Path) -> bool:
    """A safetensors file, or a folder with model files or their index."""
    if path.is_file():
        return path.suffix == ".safetensors" and is_safetensors(path) and not _is_mindspore(path)
    return any((path / n).is_file() for n in (*_INDEXES, *_SINGLES)) or _loose(path) != []


def _is_mindspore(path: Path) -> bool:
    return read_safetensors(path)[1].get("format") == "ms"


def _loose(path: Path) -> list[Path]:
    """Return the safetensors files of a folder that has no index."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    return [f for f in files if is_safetensors(f) and not _is_mindspore(f)]


def open(path: Path) -> Checkpoint:
    """Open a Hugging Face model folder or a single safetensors file."""
    problems: list[Problem] = []
    notes: list[str] = []
    tensors: list[LogicalTensor] = []
    values: dict[str, Any] = {}
    for file, wanted in model_files(path, problems).items():
        try:
            held, beside = read_file(file)
        except FormatError as error:
            problems.append(Problem(str(file), str(error)))
            continue
        tensors += [whole(name, source, file.name, stored=name) for name, source in held.items()]
        values |= beside
        problems += [
            Problem(str(file), f"the index says that it holds {n}, and it does not") for n in sorted(wanted - set(held))
        ]
    folder = path if path.is_dir() else path.parent
    config = _read_json(folder / "config.json") if path.is_dir() else {}
    state: dict[str, dict[str, Any]] = {"weights": values} if values else {}
    if path.is_dir():
        tensors += _trainer_files(folder, {t.name: t.shape for t in tensors}, state, notes)
        tensors += _further_adapters(path, problems)
        notes += _not_read(path, {piece.file for t in tensors for piece in t.pieces})
    if config:
        state["args"] = flat(config)
    return Checkpoint(
        str(path),
        "huggingface",
        gather(tensors),
        config={
            **model_config(config),
            "drawn_from": drawn_from(_read_json(folder / "adapter_config.json")),
            "quantisation": _quantisation(config.get("quantization_config") or _read_json(folder / "quantize_config.json")),
        },
        state=state,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _not_read(folder: Path, read: set[str]) -> list[str]:
    """Note files and folders of tensors that lie beside the model and are no part of what was read."""
    known = {*read, "training_args.bin", "optimizer.pt", "scheduler.pt"}
    left = [p.name for p in _with_tensors(folder) if p.name not in known and not p.name.startswith("rng_state")]
    left += [
        f"{p.name}/" for p in folder.iterdir() if p.is_dir() and not (p / "adapter_config.json").exists() and _with_tensors(p)
    ]
    return [f"not read, as the model is in other files: {', '.join(sorted(left)[:6])}"] if left else []


def _with_tensors(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.suffix in (*WEIGHTS, ".tar") and p.is_file()]


def _further_adapters(folder: Path, problems: list[Problem]) -> list[LogicalTensor]:
    """Return the tensors of adapters that PEFT has saved below the first one, as `NAME (ADAPTER)`."""
    if not any((folder / name).is_file() for name in _ADAPTERS):
        return []
    found: list[LogicalTensor] = []
    for below in sorted(p for p in folder.iterdir() if any((p / name).is_file() for name in _ADAPTERS)):
        mark = f" ({below.name})"
        for file in model_files(below, problems):
            found += [whole(name + mark, source, file.name, stored=name + mark) for name, source in read_file(file)[0].items()]
    return found


def model_files(path: Path, problems: list[Problem]) -> dict[Path, set[str]]:
    """Return the model files with the names that an index promises in each (empty set: no promise)."""
    if path.is_file():
        return {path: set()}
    for name in _INDEXES:
        if (path / name).is_file():
            weight_map = _weight_map(path / name)
            promised: dict[Path, set[str]] = {}
            for tensor, file in weight_map.items():
                promised.setdefault(inside(path, file), set()).add(tensor)
            for file in [f for f in promised if not f.is_file()]:
                lost = sorted(promised.pop(file))
                problems.append(Problem(str(file), f"is missing; it holds {len(lost)} tensors, among them {lost[0]}"))
            return promised
    single = next((path / n for n in _SINGLES if (path / n).is_file()), None)
    return {single: set()} if single is not None else {f: set() for f in _loose(path)}


def _weight_map(index: Path) -> Mapping[str, str]:
    """Return tensor → file name of an index; raise FormatError where it names none."""
    held = read_json(index)
    found: Any = held.get("weight_map") if isinstance(held, dict) else None  # pyright: ignore[reportUnknownMemberType]
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise FormatError(f"{index} is no index of shards: it needs a `weight_map` of tensor names to file names")
    return found


def read_file(file: Path) -> tuple[Mapping[str, Source], dict[str, Any]]:
    """Return the tensors of a safetensors or torch file by name, and the other values of a model that stand beside them."""
    if is_safetensors(file):
        return read_safetensors(file)[0], {}
    content = torch_archive.load(str(file))
    return dict(arrays(content)), values_of(content)


def _read_json(file: Path) -> dict[str, Any]:
    held = read_json(file) if file.is_file() else {}
    if not isinstance(held, dict):
        raise FormatError(f"{file} holds no JSON object")
    return held  # pyright: ignore[reportUnknownVariableType]


def model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the name maps need to know, from a Hugging Face config.json."""
    text: Mapping[str, Any] = config.get("text_config") or config
    heads = text.get("num_attention_heads") or text.get("n_head")
    hidden = text.get("hidden_size") or text.get("n_embd")
    return {
        "heads": heads,
        "groups": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or (hidden // heads if heads and hidden else None),
        "layers": text.get("num_hidden_layers") or text.get("n_layer"),
        "hidden": hidden,
        "tied": text.get("tie_word_embeddings", config.get("tie_word_embeddings")),
        "vocab": text.get("vocab_size") or config.get("vocab_size"),
    }


def _quantisation(config: Any) -> dict[str, Any] | None:
    """Return what decoding needs to know of a quantization_config, from which a writer's version may be missing."""
    wanted = ("quant_method", "weight_block_size", "checkpoint_format", "version")
    return {k: config[k] for k in wanted if k in config} if isinstance(config, dict) and config else None


def _trainer_files(
    folder: Path, shapes: Mapping[str, Any], state: dict[str, dict[str, Any]], notes: list[str]
) -> list[LogicalTensor]:
    """Read what the Trainer writes beside the model: optimizer.pt, scheduler.pt, rng_state*.pth, trainer_state.json."""
    trainer = _read_json(folder / "trainer_state.json")
    if trainer:
        state["iteration"] = {k: trainer[k] for k in ("global_step", "epoch") if k in trainer}
    if (folder / "scheduler.pt").is_file():
        state["scheduler"] = flat(torch_archive.load(str(folder / "scheduler.pt")))
    for file in sorted(folder.glob("rng_state*.pth")):
        rank = f"rank {file.stem.removeprefix('rng_state').strip('_') or 0}"
        held = torch_archive.load(str(file))
        state.setdefault("rng", {}).update({f"{rank}/{k}": digest(v) for k, v in dict(held).items()})
    if not (folder / "optimizer.pt").is_file():
        return []
    order = in_model_order(list(shapes))  # safetensors sort by name
    optimizer = torch_archive.load(str(folder / "optimizer.pt"))
    ordered = {n: shapes[n] for n in order} if order is not None else {}
    named = name_states(optimizer, ordered) if order is not None else None
    tensors, state["optimizer"] = optimizer_states(optimizer, named, ordered, "optimizer", "optimizer.pt", notes)
    return tensors
