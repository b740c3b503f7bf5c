"""What the name of a kernel's dump file says, in the spellings of CANN, MindSpore and the converters of both.

{op_type}.{op_name}.{task}[.{stream}].{timestamp}                        raw: a protobuf header, then the tensors
{raw}.{task_type}.{context}.{thread}.{device}                            raw, of newer releases
{raw}.{input|output}.{slot}[.{format}[.{dtype}]].{npy|bin}               one tensor
Opdebug.Node_OpDebug.{task}[.{stream}].{timestamp}[.output.{n}.json]     which unit of the device overflowed
statistic.csv                                                            one line of statistics for each tensor
mapping.csv                                                              the full names of files whose names were too long
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError

STATISTICS_FILE, MAPPING_FILE = "statistic.csv", "mapping.csv"
MOST_FILES = 500_000  # of one folder
_LARGEST_CSV = 256 << 20
_RAW = r"(?P<type>[^.]+)\.(?P<name>[^.]+(?:\.[^.]+)*?)\.(?P<task>\d{1,10})(?:\.(?P<stream>\d{1,10}))?\.(?P<time>\d{10,20})"
_RAW_FILE = re.compile(rf"{_RAW}(?:\.\d+){{0,4}}")
_TENSOR_FILE = re.compile(
    rf"{_RAW}(?:\.\d+){{0,4}}\.(?P<io>input|output)[._](?P<slot>\d{{1,6}})"
    r"(?:\.(?P<format>[A-Za-z][A-Za-z0-9_]*))?(?:\.(?P<dtype>[A-Za-z][A-Za-z0-9_]*))?\.(?P<kind>npy|bin)"
)
_OVERFLOW_JSON = re.compile(rf"{_RAW}(?:\.output\.\d+)?\.json")


@dataclass(frozen=True, slots=True)
class KernelFile:
    """A dump file and what its name says.

    kind: "raw" (protobuf header and tensors), "npy", "bin", "overflow" (raw or JSON). stream: None where it is not named.
    time: microseconds. io, slot, format, dtype: of files with one tensor; "" or -1 otherwise.
    """

    path: Path
    kind: Literal["raw", "npy", "bin", "overflow"]
    op_type: str
    op_name: str
    task: int
    stream: int | None
    time: int
    io: str = ""
    slot: int = -1
    format: str = ""
    dtype: str = ""


@cache
def _matched(name: str) -> tuple[str, re.Match[str]] | None:
    for kind, pattern in (("tensor", _TENSOR_FILE), ("raw", _RAW_FILE), ("json", _OVERFLOW_JSON)):
        found = pattern.fullmatch(name) if len(name) < 1024 else None
        if found is not None and (kind != "json" or found["type"].lower() == "opdebug"):
            return kind, found
    return None


def parse_name(path: Path, name: str | None = None) -> KernelFile | None:
    """Return what a file's name says, None where it is not the name of a kernel's dump. name: its full name, if shortened."""
    matched = _matched(name or path.name)
    if matched is None:
        return None
    kind, m = matched
    overflow = m["type"].lower() == "opdebug"
    if overflow and kind == "tensor":
        return None  # the converted copy of an overflow file
    stream = None if m["stream"] is None else int(m["stream"])
    about = m["type"], m["name"], int(m["task"]), stream, int(m["time"])
    if kind != "tensor":
        return KernelFile(path, "overflow" if overflow else "raw", *about)
    file = "npy" if m["kind"] == "npy" else "bin"
    return KernelFile(path, file, *about, m["io"], int(m["slot"]), m["format"] or "", m["dtype"] or "")


def holds_kernels(folder: Path) -> bool:
    """Tell whether a folder itself holds dump files of kernels; its folders are not looked into."""
    try:
        with os.scandir(folder) as entries:
            return any(_is_kernel(entry.name) for entry, _ in zip(entries, range(MOST_FILES), strict=False))
    except OSError:
        return False


def _is_kernel(name: str) -> bool:
    return name == STATISTICS_FILE or _matched(name) is not None


def kernel_files(folder: Path) -> Iterator[KernelFile]:
    """Yield the dump files of a folder, in no order. Links are left out. Raises FormatError where there are too many."""
    full = _mapping(folder)
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count == MOST_FILES:
                raise FormatError(f"{folder} has more than {MOST_FILES} files: name one of them, or dump fewer kernels")
            if entry.is_file(follow_symlinks=False):
                file = parse_name(Path(entry.path), full.get(entry.name))
                if file is not None:
                    yield file


def _mapping(folder: Path) -> Mapping[str, str]:
    """Return short file name → full name from mapping.csv, which MindSpore and CANN write for names that are too long."""
    path = folder / MAPPING_FILE
    if not path.is_file():
        return {}
    return {row[0].strip(): row[1].strip() for row in read_rows(path) if len(row) >= 2}


def read_rows(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file. Raises FormatError where it cannot be read as one."""
    try:
        return list(csv.reader(io.StringIO(read_bounded(path, _LARGEST_CSV).decode("utf-8", "replace"), newline="")))
    except (OSError, csv.Error) as error:
        raise FormatError(f"{path} cannot be read as CSV: {error}") from None
