"""Files of log-probabilities: safetensors, npy and npz, JSON lines, Parquet. Nothing in them is run, and all is bounded.

A JSON line is a sequence (its columns are lists) or one token (its columns are numbers); so is a row of Parquet. Arrays are
[sequences, length], or [tokens] beside `lengths` [sequences] or `sequence` [tokens]. A `.npy` file has a structured dtype, one
record a token.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trainprobe.engine.storage.dumps.tensor_store import SafetensorsReader
from trainprobe.engine.storage.npy_files import map_npy
from trainprobe.engine.storage.safe_files import lines_of, open_to_read, regular
from trainprobe.errors import FormatError
from trainprobe.rollout.logprobs.columns import MOST, WIDE, Column, gathered, known_names, wanted
from trainprobe.rollout.logprobs.tokens import ScoredTokens

LARGEST = 1 << 31  # bytes of what is read of a file, unpacked
_DAMAGED = (OSError, ValueError, EOFError, KeyError, TypeError, OverflowError, MemoryError, RuntimeError, NotImplementedError)
_PICKLED = (".bin", ".pkl", ".pickle")


def read_file(path: Path) -> ScoredTokens:
    """Return the tokens of a file. Raises FormatError for one that cannot be read, with what to do; OSError."""
    read = _READERS.get(path.suffix.lower())
    if path.suffix.lower() in _PICKLED:
        raise FormatError(
            f"{path} is a file that pickle wrote, and loading it could run code: write its columns with safetensors.numpy."
            "save_file({'tokens': …, 'mask': …, 'trainer_logprobs': …, 'engine_logprobs': …}, 'it.safetensors')"
        )
    if read is None:
        raise FormatError(f"{path} has an ending that is not known; known are {', '.join(sorted(_READERS))}")
    regular(path)
    try:
        return gathered(read(path), str(path))
    except FormatError:
        raise
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FormatError(f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None


def _safetensors(path: Path) -> dict[str, Column]:
    reader = SafetensorsReader(path)
    return {name: reader.array(name) for name in wanted(list(reader.entries))}


def _npy(path: Path) -> dict[str, Column]:
    array = map_npy(path)
    if array.dtype.names is None:
        raise FormatError(
            f"{path} is one array of {array.dtype}: give a structured dtype with a field a column, or an .npz file"
        )
    return {name: array[name].reshape(-1) for name in wanted(list(array.dtype.names))}


def _npz(path: Path) -> dict[str, Column]:
    found: dict[str, Column] = {}
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            given = wanted(list(members))
            if sum(members[name].file_size for name in given) > LARGEST:
                raise FormatError(f"{path} unpacks to more than {LARGEST} bytes: split the file")
            for name in given:
                content = archive.read(members[name])
                file = io.BytesIO(content)
                shape, dtype = _header(file)
                if dtype.hasobject:
                    raise FormatError(f"{path}: {name} holds objects, which need pickle")
                found[name] = np.frombuffer(content, dtype, math.prod(shape), file.tell()).reshape(shape)
    except zipfile.BadZipFile as error:
        raise FormatError(f"{path} is no .npz file: {error}") from None
    return found


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an array in an open .npy file, and stand at its first byte."""
    version = np.lib.format.read_magic(file)
    readers: dict[Any, Callable[[Any], Any]] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise FormatError(f"NumPy format {version} is not known")
    shape, fortran, dtype = readers[version](file)
    if fortran and len(shape) > 1:
        raise FormatError("an array stands in Fortran's order: save numpy.ascontiguousarray(it)")
    return tuple(shape), dtype


def _json_lines(path: Path) -> dict[str, Column]:
    names = known_names()
    found: dict[str, list[Any]] = {}
    number = places = 0
    with open_to_read(path) as file:
        for number, line in enumerate(lines_of(file, path), 1):
            if not line.strip():
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise FormatError(f"{path}, line {number}, is no JSON: {error}") from None
            if not isinstance(record, dict):
                raise FormatError(f"{path}, line {number}, is no object of columns")
            given = {name: value for name, value in record.items() if name in names and value is not None}
            if found and given.keys() != found.keys():
                odd = sorted(given.keys() ^ found.keys())[0]
                raise FormatError(f"{path}, line {number}: {odd!r} is in some lines and not in others")
            for name, value in given.items():
                held = found.setdefault(name, [])
                held.append(_array(value, name, f"{path}, line {number}") if isinstance(value, list) else value)
                places += len(value) if isinstance(value, list) else 1
            if places > MOST * 8:
                raise FormatError(f"{path} has more than {MOST * 8:,} values: split the file")
    return {name: _joined(values, f"{path}: {name}") for name, values in found.items()}


def _array(value: list[Any], name: str, where: str) -> npt.NDArray[Any]:
    if name in WIDE:  # numbers a token, or a layer and token
        value = [np.asarray(part).reshape(-1) for part in value]
    try:
        array = np.asarray([math.nan if part is None else part for part in value] if None in value else value)
    except ValueError as error:
        raise FormatError(f"{where}: {name} is a ragged list: {error}") from None
    except TypeError:
        raise FormatError(f"{where}: {name} is no list of numbers") from None
    if array.dtype.kind not in "biufU":
        raise FormatError(f"{where}: {name} is no list of numbers")
    return array.astype(np.float32) if array.dtype == np.float64 and name in WIDE else array


def _joined(values: list[Any], where: str) -> Column:
    lists = [isinstance(value, np.ndarray) for value in values]
    if all(lists):
        return values
    if any(lists):
        raise FormatError(f"{where} is a list in some lines and one value in others")
    array = np.asarray(values)
    if array.dtype.kind not in "biufU":
        raise FormatError(f"{where} holds other things than numbers")
    return array


def _parquet(path: Path) -> dict[str, Column]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(regular(path)) as file:
            meta = file.metadata
            unpacked = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            names = wanted(file.schema_arrow.names)
            if meta.num_rows > MOST or unpacked > LARGEST:
                raise FormatError(f"{path} has {meta.num_rows:,} rows of {unpacked:,} bytes: split the file")
            found: dict[str, Column] = {}
            for name in names:
                found[name] = _arrow(file.read([name]).column(name).combine_chunks(), f"{path}: {name}")
            return found
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FormatError(f"{path} is no Parquet file that can be read: {str(error)[:300]}") from None


def _arrow(column: Any, where: str) -> Column:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return column.to_numpy(zero_copy_only=False) if not pa.types.is_string(kind) else np.asarray(column.to_pylist())
    if column.null_count:
        raise FormatError(f"{where} has a row that is null")
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    inner, width = column.flatten(), 1
    while pa.types.is_list(inner.type) or pa.types.is_fixed_size_list(inner.type):
        sizes = set(inner.value_lengths().to_pylist())
        if len(sizes) != 1:
            raise FormatError(f"{where} has tokens of several widths")
        inner, width = inner.flatten(), width * sizes.pop()
    values = np.asarray(inner.to_pylist()) if pa.types.is_string(inner.type) else inner.to_numpy(zero_copy_only=False)
    values = values.reshape(-1, width) if width > 1 else values
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


_READERS: dict[str, Callable[[Path], dict[str, Column]]] = {
    ".safetensors": _safetensors,
    ".npy": _npy,
    ".npz": _npz,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}
