"""`.metadata` of a distributed checkpoint: what tensors it holds, in which chunks, and where each chunk lies.

It is one pickle with eight objects for each tensor. Those of which a checkpoint has a million become small objects of their
own as soon as their attributes arrive, and what repeats the names in another form (`planner_data`) is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.pieces import Point
from trainprobe.ckpt_compare.storage.inert_objects import Stateful
from trainprobe.ckpt_compare.storage.inert_pickle import read_pickle
from trainprobe.ckpt_compare.storage.mapped import extent, mapping
from trainprobe.engine.compare.number_formats import number_format
from trainprobe.errors import FormatError

_CLASSES = "torch.distributed.checkpoint.metadata."
_SHARED_LEAST, _SHARED_MOST = 100_000, 8  # chunks that lists may name: so many, and so many times the chunks that lie somewhere


@lru_cache(maxsize=1024)
def _same_number(number: int) -> int:
    """Return the same object for equal numbers: a million items have a few lengths."""
    return number


class Place(Stateful):
    """Where an item lies: path in the folder, first byte, bytes."""

    __slots__ = ("length", "path", "start")

    def set_state(self, state: Any) -> None:
        """Take the attributes of torch's `_StorageInfo`; raise FormatError for numbers that no place has."""
        self.path, self.start, length = state["relative_path"], state["offset"], state["length"]
        if not (type(self.start) is type(length) is int and min(self.start, length) >= 0):
            raise FormatError(f"it has {self.start!r} and {length!r} for the first byte and the length of an item")
        self.length = _same_number(length)


class Chunk(Stateful):
    """A rectangle of a tensor."""

    __slots__ = ("offset", "shape")

    def set_state(self, state: Any) -> None:
        """Take the attributes of torch's `ChunkStorageMetadata`."""
        self.offset, self.shape = extent(state["offsets"]), extent(state["sizes"])


class _Properties(Stateful):
    __slots__ = ("dtype",)

    def set_state(self, state: Any) -> None:
        self.dtype = str(state[0] if isinstance(state, tuple) else state["dtype"])  # pyright: ignore[reportUnknownArgumentType]


class Described(Stateful):
    """A tensor: its format, whole shape and chunks; no chunks where one is the whole tensor."""

    __slots__ = ("chunks", "format", "shape")
    unchanging = True

    def set_state(self, state: Any) -> None:
        """Take the attributes of torch's `TensorStorageMetadata`; raise FormatError where they have arrived already."""
        if hasattr(self, "chunks"):
            raise FormatError("a tensor is described twice")
        chunks = state["chunks"]
        if not isinstance(chunks, list) or not all(isinstance(c, Chunk) for c in chunks):  # pyright: ignore
            raise FormatError("a tensor without a list of its chunks")
        self.format, self.shape = number_format(state["properties"].dtype), extent(state["size"])
        self.chunks: tuple[Chunk, ...] = tuple(chunks)  # pyright: ignore[reportUnknownArgumentType]
        if len(self.chunks) == 1 and self.chunks[0].shape == self.shape and not any(self.chunks[0].offset):
            self.chunks = ()


class _Index(Stateful):
    __slots__ = ("name", "offset")

    def set_state(self, state: Any) -> None:
        self.name, self.offset = state["fqn"], extent(state.get("offset") or ())
        if type(self.name) is not str:
            raise FormatError("an item whose name is no text")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What `.metadata` says. tensors: by key; objects: where the items lie that are no tensors."""

    tensors: dict[str, Described]
    objects: dict[str, Place]
    places: dict[str | tuple[str, Point], Place]  # by key for the chunk at the origin, by (key, offset) for all others

    def place(self, key: str, offset: Point) -> Place | None:
        """Return where a chunk lies; None where nothing says so."""
        return self.places.get(_place_key(key, offset))


def _place_key(key: str, offset: Point) -> str | tuple[str, Point]:
    return (key, offset) if any(offset) else key


_OBJECTS: dict[str, Any] = {
    f"{_CLASSES}MetadataIndex": _Index,
    f"{_CLASSES}TensorStorageMetadata": Described,
    f"{_CLASSES}TensorProperties": _Properties,
    f"{_CLASSES}ChunkStorageMetadata": Chunk,
    "torch.distributed.checkpoint.filesystem._StorageInfo": Place,
}


def read(file: Path) -> Metadata:
    """Read `.metadata`; raise FormatError for a damaged or hostile one."""
    found = read_pickle(mapping(str(file)), str(file), _OBJECTS, unwanted=frozenset(["planner_data"]))
    listed, stored = found["state_dict_metadata"], found["storage_data"]
    if not isinstance(listed, dict) or not isinstance(stored, dict):
        raise FormatError(f"{file} lacks its list of tensors or of places")
    places = _places(file, stored)  # pyright: ignore[reportUnknownArgumentType]
    tensors: dict[str, Described] = {}
    objects: dict[str, Place] = {}
    chunks = 0
    for key, entry in listed.items():  # pyright: ignore[reportUnknownVariableType]
        if type(key) is not str:
            raise FormatError(f"{file} holds a tensor whose name is no text")
        if isinstance(entry, Described):
            tensors[key] = entry
            chunks += len(entry.chunks)
        elif key in places:
            objects[key] = places[key]
    if chunks > _SHARED_LEAST + _SHARED_MOST * len(places):
        raise FormatError(f"{file} lists {chunks:,} chunks of tensors, of which at most {len(places):,} lie somewhere")
    return Metadata(tensors, objects, places)


def _places(file: Path, stored: dict[Any, Any]) -> dict[str | tuple[str, Point], Place]:
    """Return the places by key; the entries are taken out, so that both are never whole at the same time."""
    places: dict[str | tuple[str, Point], Place] = {}
    while stored:
        index, place = stored.popitem()
        if not isinstance(index, _Index) or not isinstance(place, Place):
            raise FormatError(f"{file} was written by a storage writer that is not known: its places are {str(place)[:80]}")
        places.setdefault(_place_key(index.name, index.offset), place)  # the last of equal ones comes first here
    return places
