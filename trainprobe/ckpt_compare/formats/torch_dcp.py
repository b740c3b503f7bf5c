"""PyTorch distributed checkpoints: a folder with `.metadata` and `.distcp` files (FSDP, Lightning's sharded strategies,
torchtitan).

The metadata gives each tensor's whole shape and each chunk's offset, so nothing is guessed. Every item in a `.distcp` file is
a small torch archive of its own, opened when its numbers are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.optimizer_names import is_array, one_or_all, scalar
from trainprobe.ckpt_compare.pieces import Array, Checkpoint, LogicalTensor, Piece, Point, Problem
from trainprobe.ckpt_compare.plain_state import flat
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.ckpt_compare.storage.inert_pickle import read_pickle
from trainprobe.ckpt_compare.storage.mapped import extent, forget_pages, inside, mapping
from trainprobe.engine.diff.number_formats import NumberFormat, number_format
from trainprobe.errors import FormatError

_STATE = re.compile(r"(?:optim\w*|optimizers?(?:_\d+)?|osd)\.(?:state\.)?(?P<name>.+)\.(?P<slot>[A-Za-z_]\w*)")
_WEIGHT_PREFIX = re.compile(r"(?:model|state_dict|module|app\.model|model_state_dict)\.")
_SETTINGS = re.compile(r"(?:optim\w*|optimizers?(?:_\d+)?)\.param_groups\.")
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk of a tensor: a torch archive at some bytes of a file. It knows its shape without being opened."""

    path: str
    start: int
    length: int
    shape: Point
    format: NumberFormat

    def load(self) -> Array:
        """Open the archive and map its tensor."""
        array = torch_archive.load_part(self.path, self.start, self.length)
        if not is_array(array) or array.shape != self.shape:
            found = list(array.shape) if is_array(array) else type(array).__name__
            raise FormatError(
                f"{self.path} at byte {self.start}: metadata announces shape {list(self.shape)}, the file holds {found}"
            )
        return array.load()

    def release(self) -> None:
        """Let go of the resident pages of the archive."""
        forget_pages(self.path, self.start, self.start + self.length)


@dataclass(frozen=True, slots=True)
class Stored:
    """What `.metadata` says: tensors by key, and where the items that are not tensors lie."""

    tensors: Mapping[str, LogicalTensor]
    objects: Mapping[str, tuple[str, int, int]]
    problems: tuple[Problem, ...]


def sniff(path: Path) -> bool:
    """A folder with `.metadata`, and not one of the families that build on it."""
    return (path / ".metadata").is_file() and not (path / "metadata.json").exists()


def read_metadata(folder: Path) -> Stored:
    """Read `.metadata` of a distributed checkpoint."""
    file = str(folder / ".metadata")
    meta = read_pickle(mapping(file), file)
    places = {(index["fqn"], tuple(index.state.get("offset") or ())): info for index, info in meta["storage_data"].items()}
    tensors: dict[str, LogicalTensor] = {}
    objects: dict[str, tuple[str, int, int]] = {}
    problems: list[Problem] = []
    for key, entry in meta["state_dict_metadata"].items():
        if "chunks" not in entry.state:
            info = places.get((key, ()))
            if info is not None:
                objects[key] = (str(inside(folder, info["relative_path"])), *_span(info))
            continue
        fmt = number_format(_dtype(entry["properties"]))
        pieces = tuple(_pieces(folder, key, entry["chunks"], fmt, places, problems))
        tensors[key] = LogicalTensor(key, extent(entry["size"]), pieces)
    return Stored(tensors, objects, tuple(problems))


def _span(info: Any) -> tuple[int, int]:
    """Return first byte and length of an item."""
    start, length = info["offset"], info["length"]
    if not (isinstance(start, int) and isinstance(length, int) and min(start, length) >= 0):
        raise FormatError(f"the metadata has {start!r} and {length!r} for the first byte and the length of an item")
    return start, length


def _dtype(properties: Any) -> str:
    state = properties.state.get("state", properties.state)
    return str(state[0] if isinstance(state, tuple) else state["dtype"])


def _pieces(
    folder: Path, key: str, chunks: Any, fmt: NumberFormat, places: Mapping[Any, Any], problems: list[Problem]
) -> Iterator[Piece]:
    for chunk in chunks:
        offset, size = extent(chunk["offsets"]), extent(chunk["sizes"])
        info = places.get((key, offset))
        if info is None:
            problems.append(
                Problem(f"{folder}: {key} at {list(offset)}", "the metadata lists this chunk but not where it lies")
            )
            continue
        file = inside(folder, info["relative_path"])
        if not file.exists():
            problems.append(Problem(str(file), f"is missing; it holds {key} at {list(offset)}"))
            continue
        yield Piece(offset, Item(str(file), *_span(info), size, fmt), f"{file.name}: {key} at {list(offset)}")


def open(path: Path) -> Checkpoint:
    """Open a distributed checkpoint; weights, optimizer states by parameter name, and settings."""
    stored = read_metadata(path)
    tensors: dict[str, LogicalTensor] = {}
    steps: set[float] = set()
    problems = list(stored.problems)
    settings: dict[str, Any] = {}
    prefix = _wrapper([k for k in stored.tensors if not _STATE.fullmatch(k) and not _SETTINGS.match(k)])
    for key, tensor in stored.tensors.items():
        match = _STATE.fullmatch(key)
        if match is not None and match["slot"] == "step":
            _count(tensor, steps, problems)
            continue
        if _SETTINGS.match(key):
            continue
        name, slot = (match["name"], match["slot"]) if match is not None else (key.removeprefix(prefix), "")
        made = LogicalTensor(_WRAPPERS.sub("", name), tensor.shape, tensor.held, slot, native=key)
        tensors[made.key] = made
    state: dict[str, dict[str, Any]] = {"args": settings}
    for key, place in stored.objects.items():
        if _SETTINGS.match(key):
            continue
        try:
            settings.update({f"{key}.{k}".rstrip("."): v for k, v in flat(load_object(place)).items()})
        except FormatError as error:
            problems.append(Problem(key, str(error)))
    if steps:
        state["optimizer"] = {"step": one_or_all(sorted(steps))}
    return Checkpoint(str(path), "torch_dcp", tensors, state=state, problems=tuple(problems))


def _count(tensor: LogicalTensor, steps: set[float], problems: list[Problem]) -> None:
    """Read a step count; each rank stores one."""
    for piece in tensor.pieces:
        try:
            steps.add(scalar(piece.source))
        except FormatError as error:
            problems.append(Problem(piece.where, str(error)))


def load_object(place: tuple[str, int, int]) -> Any:
    """Read one item that is no tensor."""
    path, start, length = place
    return torch_archive.load_part(path, start, length)


def _wrapper(weights: list[str]) -> str:
    """Return the `model.` or `state_dict.` that all weights carry when the checkpoint was saved as a dict of dicts.

    A Llama saved on its own has its names under `model.` as well; the comparison tells the two apart by the other side's names.
    """
    match = _WEIGHT_PREFIX.match(weights[0]) if weights else None
    return match[0] if match is not None and all(k.startswith(match[0]) for k in weights) else ""
