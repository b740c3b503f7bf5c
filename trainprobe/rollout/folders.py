"""The folder layout of saved key data: where each array lies, and which arrays a folder holds.

    data/NAME/step3/rank0/micro_step1/NAME.npy           one tensor
                                      NAME.2.npy         the third item of a list; NAME.old.npy the entry "old" of a dict
                                      NAME.json          {"data": statistics in the shape of what was saved, "order": …}
    configurations.json                                  what `save_config` was given

`micro_stepM` is left out where `save_ex` was called without a micro-batch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trainprobe.engine.storage.npy_files import map_npy
from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError

Array = npt.NDArray[Any]
_NAME = re.compile(r"[^\W.][\w.+ -]{0,199}")  # one component of a path, on every file system
_LARGEST_JSON = 64 << 20  # bytes


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Which array: of which step, micro-batch, rank and key; `item` is its dotted path inside a list or dict, or empty."""

    step: int
    micro: int
    rank: int
    key: str
    item: str = ""

    def __str__(self) -> str:
        """Say it as a person would."""
        name = f"{self.key}.{self.item}" if self.item else self.key
        return f"{name} (step {self.step}, rank {self.rank}, micro-batch {self.micro})"


def refusal_of_name(name: object) -> str | None:
    """Return why `name` cannot be part of a file name, or None when it can."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    return (
        f"{name!r} cannot be a file name: use letters, digits, '_', '-', '+', '.' and spaces, and begin with a letter or digit"
    )


def folder_of(root: Path, key: str, step: int, rank: int, micro: int | None) -> Path:
    """Return the folder of one key's arrays."""
    folder = root / "data" / key / f"step{step}" / f"rank{rank}"
    return folder if micro is None else folder / f"micro_step{micro}"


def held_by_rank(root: Path, rank: int) -> bool:
    """Tell whether a folder holds data of a rank already."""
    return any(root.glob(f"data/*/step*/rank{rank}"))


@dataclass(frozen=True, slots=True)
class Folder:
    """The arrays of one run.

    order: key → when it was first saved within a step; formats: number format as it was saved (an array of bfloat16 is kept
    as float32). Both hold what is known: other tools write neither.
    """

    root: Path
    arrays: dict[Address, Path]
    order: dict[str, int]
    formats: dict[Address, str]

    def load(self, address: Address) -> Array:
        """Return one array, memory-mapped. Raises FormatError for a file that is no plain array."""
        path = self.arrays[address]
        return map_npy(path)


def read_folder(root: str | os.PathLike[str]) -> Folder:
    """List what a run saved. Raises FormatError for a folder without `data/`, or one that holds no array."""
    base = Path(root)
    data = base / "data"
    if not data.is_dir():
        raise FormatError(f"{base} holds no key data: expected a folder `data` in it, as SingleSave writes one")
    arrays: dict[Address, Path] = {}
    formats: dict[Address, str] = {}
    order: dict[str, int] = {}
    statistics = cache(_statistics)
    for path in sorted(data.glob("*/step*/rank*/**/*.npy")):
        address = _address(path, data)
        if address is None or not path.is_file():
            continue
        arrays[address] = path
        facts = statistics(path.parent / f"{address.key}.json")
        if isinstance(place := facts.get("order"), int):
            order.setdefault(address.key, place)
        if isinstance(dtype := _at(facts.get("data"), address), str):
            formats[address] = dtype
    if not arrays:
        raise FormatError(f"{data} holds no array: expected NAME/stepN/rankR/micro_stepM/NAME.npy")
    return Folder(base, arrays, order, formats)


def _address(path: Path, data: Path) -> Address | None:
    key, step, rank, *micro = path.relative_to(data).parts[:-1]
    numbers = [_number("step", step), _number("rank", rank), _number("micro_step", micro[0]) if micro else 0]
    if None in numbers or len(micro) > 1 or not (path.stem == key or path.stem.startswith(f"{key}.")):
        return None
    step_number, rank_number, micro_number = (number or 0 for number in numbers)
    return Address(step_number, micro_number, rank_number, key, path.stem[len(key) + 1 :])


def _number(prefix: str, text: str) -> int | None:
    digits = text.removeprefix(prefix)
    return int(digits) if text.startswith(prefix) and digits.isdecimal() and len(digits) < 18 else None


def _statistics(path: Path) -> dict[str, Any]:
    """Return what stands beside the arrays of a key; nothing where it cannot be read."""
    try:
        facts: Any = json.loads(read_bounded(path, _LARGEST_JSON, follow=True))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}  # pyright: ignore


def _at(tree: Any, address: Address) -> Any:
    """Return the dtype that the statistics of an array name, or None."""
    for part in items(address):
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part] if part < len(tree) else None  # pyright: ignore
        else:
            tree = tree.get(str(part)) if isinstance(tree, dict) else None  # pyright: ignore
    return tree.get("dtype") if isinstance(tree, dict) else None  # pyright: ignore


def items(address: Address) -> Iterator[int | str]:
    """Yield the parts of an item's path; whole numbers as numbers, so that item 10 comes after item 9."""
    for part in address.item.split(".") if address.item else ():
        yield int(part) if part.isdecimal() and len(part) < 18 else part
