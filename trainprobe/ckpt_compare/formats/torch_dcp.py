"""PyTorch distributed checkpoints: a folder with `.metadata` and `.distcp` files (FSDP, Lightning's sharded strategies,
torchtitan).

The metadata gives each tensor's whole shape and each chunk's offset, so nothing is guessed. Every item in a `.distcp` file is
a small torch archive of its own, opened when its numbers are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats.plain_torch import ITERATION_KEYS, is_plain
from trainprobe.ckpt_compare.optimizer_names import Steps, is_array, one_or_all, scalar
from trainprobe.ckpt_compare.pieces import Array, Checkpoint, LogicalTensor, Piece, Problem, file_name, origin
from trainprobe.ckpt_compare.plain_state import flat
from trainprobe.ckpt_compare.state import EXTRA
from trainprobe.ckpt_compare.storage import dcp_metadata, torch_archive
from trainprobe.ckpt_compare.storage.mapped import Mapped, inside
from trainprobe.engine.compare.number_formats import NumberFormat
from trainprobe.engine.geometry.rectangles import Point
from trainprobe.errors import FormatError

_STATE = re.compile(r"(?:optim\w*|optimizers?(?:_\d+)?|osd)\.(?:state\.)?(?P<name>.+)\.(?P<slot>[A-Za-z_]\w*)")
_WEIGHT_PREFIX = re.compile(r"(?:model|state_dict|module|app\.model|model_state_dict)\.")
_FLAT_STATE = re.compile(r"state\.(?P<name>.+)\.(?P<slot>[A-Za-z_]\w*)")  # of an optimizer that is saved beside the weights
_SETTINGS = re.compile(r"(?:(?:optim\w*|optimizers?(?:_\d+)?)\.)?param_groups\.")
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")


@dataclass(frozen=True, slots=True)
class _ItemForm:
    """What a million items have in common: their file, length, and the shape and format of their tensors."""

    path: str
    length: int
    shape: Point
    format: NumberFormat


_form = lru_cache(maxsize=1024)(_ItemForm)  # one object for equal ones


@dataclass(frozen=True, slots=True)
class Item(Mapped):
    """One chunk of a tensor: a torch archive at some bytes of a file. It knows its shape without being opened."""

    start: int
    form: _ItemForm

    @property
    def path(self) -> str:
        """The file."""
        return self.form.path

    @property
    def shape(self) -> Point:
        """Shape of the tensor in it."""
        return self.form.shape

    @property
    def format(self) -> NumberFormat:
        """Number format of the tensor in it."""
        return self.form.format

    def lies(self) -> tuple[str, int, int]:
        """Return the file, the first byte of the archive in it and the byte behind it."""
        return self.path, self.start, self.start + self.form.length

    def load(self) -> Array:
        """Open the archive and map its tensor."""
        path, shape = self.form.path, self.form.shape
        array = torch_archive.load_part(path, self.start, self.form.length)
        if not is_array(array) or array.shape != shape:
            found = list(array.shape) if is_array(array) else type(array).__name__
            raise FormatError(f"{path} at byte {self.start}: metadata announces shape {list(shape)}, the file holds {found}")
        return array.load()


@dataclass(frozen=True, slots=True)
class Stored:
    """What `.metadata` says: tensors by key, and where the items that are not tensors lie."""

    tensors: dict[str, LogicalTensor]
    objects: Mapping[str, tuple[str, int, int]]
    problems: tuple[Problem, ...]


def sniff(path: Path) -> bool:
    """A folder with `.metadata`, and not one of the families that build on it."""
    return (path / ".metadata").is_file() and not (path / "metadata.json").exists()


def read_metadata(folder: Path) -> Stored:
    """Read `.metadata` of a distributed checkpoint."""
    meta = dcp_metadata.read(folder / ".metadata")
    files = _Files(folder)
    tensors: dict[str, LogicalTensor] = {}
    problems: list[Problem] = []
    for key in list(meta.tensors):
        entry = meta.tensors.pop(key)
        held: tuple[Piece, ...] | Item = ()
        if entry.chunks:
            held = tuple(_pieces(files, meta, key, entry, problems))
        else:
            held = _item(files, meta, key, origin(len(entry.shape)), entry.shape, entry.format, problems) or ()
        tensors[key] = LogicalTensor(key, entry.shape, held)
    objects = {key: (files.path(place), place.start, place.length) for key, place in meta.objects.items()}
    return Stored(tensors, objects, tuple(problems))


class _Files:
    """The files of a folder, each looked for once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: dict[Any, tuple[str, bool]] = {}

    def path(self, place: dcp_metadata.Place) -> str:
        """Return the path of the file that an item lies in; raise UnsafeFile for one outside of the folder."""
        return self._look(place)[0]

    def exists(self, place: dcp_metadata.Place) -> bool:
        """Whether this file is there."""
        return self._look(place)[1]

    def _look(self, place: dcp_metadata.Place) -> tuple[str, bool]:
        if place.path not in self._paths:
            file = inside(self.folder, place.path)
            self._paths[place.path] = str(file), file.exists()
        return self._paths[place.path]


def _item(
    files: _Files,
    meta: dcp_metadata.Metadata,
    key: str,
    offset: Point,
    shape: Point,
    fmt: NumberFormat,
    problems: list[Problem],
) -> Item | None:
    """Return the chunk of a tensor at an offset; note a problem and return None where there is none."""
    place = meta.place(key, offset)
    if place is None:
        problems.append(
            Problem(f"{files.folder}: {key} at {list(offset)}", "the metadata lists this chunk but not where it lies")
        )
        return None
    if not files.exists(place):
        problems.append(Problem(files.path(place), f"is missing; it holds {key} at {list(offset)}"))
        return None
    return Item(place.start, _form(files.path(place), place.length, shape, fmt))


def _pieces(
    files: _Files, meta: dcp_metadata.Metadata, key: str, entry: dcp_metadata.Described, problems: list[Problem]
) -> Iterator[Piece]:
    for chunk in entry.chunks:
        item = _item(files, meta, key, chunk.offset, chunk.shape, entry.format, problems)
        if item is not None:
            yield Piece(chunk.offset, item, f"{file_name(item.path)}: {key} at {list(chunk.offset)}")


def open(path: Path) -> Checkpoint:
    """Open a distributed checkpoint; weights, optimizer states by parameter name, and settings."""
    stored = read_metadata(path)
    tensors: dict[str, LogicalTensor] = {}
    steps: Steps = {}
    problems = list(stored.problems)
    settings: dict[str, Any] = {}
    flat_states = any(k.startswith("param_groups.") for k in [*stored.tensors, *stored.objects])
    pattern = _FLAT_STATE if flat_states else _STATE
    prefix = _wrapper([k for k in stored.tensors if not pattern.fullmatch(k) and not _SETTINGS.match(k)])
    for key in list(stored.tensors):
        tensor = stored.tensors.pop(key)  # of a million tensors those of both names are too many
        match = pattern.fullmatch(key)
        if match is not None and match["slot"] == "step":
            _count(tensor, _WRAPPERS.sub("", match["name"]), steps, problems)
            continue
        if _SETTINGS.match(key):
            continue
        name, slot = (match["name"], match["slot"]) if match is not None else (key.removeprefix(prefix), "")
        made = LogicalTensor(_WRAPPERS.sub("", name), tensor.shape, tensor.held, slot, native=key)
        tensors[made.key] = made
    values: dict[str, Any] = {}
    modules = {t.native.partition(".")[0] for t in tensors.values() if not t.slot}
    for key, place in stored.objects.items():
        if _SETTINGS.match(key):
            continue
        of_model = key.startswith(prefix) if prefix else "." in key and key.partition(".")[0] in modules
        of_model = (of_model or key.endswith(EXTRA)) and not pattern.fullmatch(key)
        try:
            value = load_object(place)
        except FormatError as error:
            problems.append(Problem(key, str(error)))
            continue
        of_model |= not prefix and "." not in key and key not in ITERATION_KEYS and is_plain(value)
        name = _WRAPPERS.sub("", key.removeprefix(prefix)) if of_model else key
        found = {f"{name}.{k}".rstrip("."): v for k, v in flat(value).items()}
        (values if of_model else settings).update(found)
    state: dict[str, dict[str, Any]] = {"args": settings, **({"weights": values} if values else {})}
    if steps:
        state["optimizer"] = {"step": one_or_all(steps)}
    return Checkpoint(str(path), "torch_dcp", tensors, state=state, problems=tuple(problems))


def _count(tensor: LogicalTensor, name: str, steps: Steps, problems: list[Problem]) -> None:
    """Read the step count of a parameter; each rank stores one."""
    for piece in tensor.pieces:
        try:
            steps.setdefault(scalar(piece.source), set()).add(name)
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
