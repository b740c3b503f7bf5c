"""Arrays in zarr's layout, version 2: a folder with `.zarray` and one file a chunk.

Chunks that are stored as they are get mapped like any other file; compressed ones are decoded by numcodecs, zarr's own library.
Source: the zarr storage specification, version 2.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.pieces import LogicalTensor, Piece, Point, Problem, Source, window
from trainprobe.ckpt_compare.storage.mapped import HeldArray, MappedArray, extent, read_json
from trainprobe.engine.compare.number_formats import NumberFormat, number_format
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded
from trainprobe.errors import FormatError, MissingExtra

MOST_CHUNKS = 1_000_000


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A compressed chunk; `load` decodes it, and nothing of it stays in memory."""

    path: str
    shape: Point
    format: NumberFormat
    codec: str  # its settings as JSON, so that a task can travel

    def load(self) -> npt.NDArray[Any]:
        """Decode the chunk; raise FormatError for one that does not decode to its shape, MissingExtra without numcodecs."""
        try:
            numcodecs = importlib.import_module("numcodecs")
        except ImportError:
            raise MissingExtra("numcodecs", "zarr", f"reading {self.path}, a compressed zarr chunk,") from None
        try:
            raw = numcodecs.get_codec(json.loads(self.codec)).decode(read_bounded(Path(self.path), LARGEST_STATE, follow=True))
            return np.frombuffer(raw, np.uint8).view(self.format.storage).reshape(self.shape)
        except (OSError, ValueError, RuntimeError) as error:
            raise FormatError(f"{self.path} cannot be decoded as a zarr chunk of shape {list(self.shape)}: {error}") from error


def read_zarr(folder: Path, name: str, problems: list[Problem]) -> LogicalTensor:
    """Return the array in `folder` with one piece a chunk; raise FormatError for a `.zarray` that cannot be understood."""
    try:
        meta = read_json(folder / ".zarray")
        shape, chunk = extent(meta["shape"]), extent(meta["chunks"])
        fmt = number_format(_dtype(meta["dtype"]))
        if meta["zarr_format"] != 2 or meta.get("filters") or meta["order"] not in ("C", "F") or len(chunk) != len(shape):
            raise ValueError("zarr version 2 without filters is what can be read")
        if math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True)) > MOST_CHUNKS:
            raise ValueError(f"shape {list(shape)} in chunks of {list(chunk)} are more than {MOST_CHUNKS} chunks")
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise FormatError(f"{folder / '.zarray'} cannot be read: {error}") from error
    return LogicalTensor(name, shape, tuple(_pieces(folder, name, shape, chunk, fmt, meta, problems)))


def _dtype(text: str) -> str:
    """Return `float32` of `<f4`; bfloat16 is written by its name."""
    if text == "bfloat16":
        return text
    dtype = np.dtype(text)
    if dtype.newbyteorder("<") != dtype:
        raise ValueError(f"{text} has its bytes the other way round")
    return dtype.name


def _pieces(
    folder: Path, name: str, shape: Point, chunk: Point, fmt: NumberFormat, meta: Mapping[str, Any], problems: list[Problem]
) -> Iterator[Piece]:
    separator = meta.get("dimension_separator", ".")
    for at in product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True))):
        file = folder / (separator.join(map(str, at)) or "0")
        offset = tuple(i * c for i, c in zip(at, chunk, strict=True))
        valid = tuple(slice(0, min(c, n - o)) for c, n, o in zip(chunk, shape, offset, strict=True))
        source = _source(file, chunk, fmt, meta)
        if source is None:
            problems.append(Problem(str(file), f"is missing; it holds {name} at {list(offset)}"))
        else:
            yield Piece(offset, window(source, valid), f"{name}/{file.relative_to(folder)}")


def _source(file: Path, chunk: Point, fmt: NumberFormat, meta: Mapping[str, Any]) -> Source | None:
    if not file.is_file():
        if meta.get("fill_value") != 0:
            return None
        return HeldArray(np.broadcast_to(np.zeros((), fmt.storage), chunk), fmt)  # a chunk of zeros need not be stored
    if meta.get("compressor") is not None:
        if meta["order"] == "F":
            raise FormatError(f"{file}: compressed chunks in column-major order are not read")
        return PackedChunk(str(file), chunk, fmt, json.dumps(meta["compressor"]))
    strides = None
    if meta["order"] == "F":
        strides = tuple(math.prod(chunk[:axis]) for axis in range(len(chunk)))
    return MappedArray(str(file), 0, chunk, fmt, strides)
