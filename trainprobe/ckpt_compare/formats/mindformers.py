"""Folders that MindFormers' own `save_checkpoint` writes: a file of weights and one of optimizer states for each rank.

`iteration_00000003/` holds `[PREFIX-]model-RANK-RANKS.safetensors` and `[PREFIX-]opt-…`, and of a training whose parameters are
cut a `metadata.json`: of each parameter into how many parts its axes are cut, and of each part, numbered in row-major order,
the files that hold it. The folder above names the newest iteration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.mindspore_names import is_scalar, split
from trainprobe.ckpt_compare.optimizer_names import scalar
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Piece, Problem, gather
from trainprobe.ckpt_compare.storage.mapped import MappedArray, inside, read_json, read_text
from trainprobe.ckpt_compare.storage.safetensors_file import is_safetensors, read_safetensors
from trainprobe.errors import FormatError

_FILE = re.compile(r"(?:.+-)?(?:model|opt)-(\d{7})-(\d{7})\.safetensors")
_PART = re.compile(r"\((['\"])(?P<name>.+)\1, \((?P<number>\d+),\)\)")
_NEWEST = "latest_checkpointed_iteration.txt"


def sniff(path: Path) -> bool:
    """A folder of such files, or the one above it."""
    return path.is_dir() and any(is_safetensors(file) for file in _files(_folder(path)))


def _folder(path: Path) -> Path:
    """Return the folder of the newest iteration, or the folder itself where it names none."""
    if not (path / _NEWEST).is_file():
        return path
    newest = read_text(path / _NEWEST).strip()
    return path / f"iteration_{int(newest):08d}" if newest.isdecimal() else path


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder, by rank."""
    found = [file for file in folder.glob("*.safetensors") if _FILE.fullmatch(file.name)] if folder.is_dir() else []
    return sorted(found, key=lambda file: (_rank(file), file.name))


def _rank(file: Path) -> int:
    matched = _FILE.fullmatch(file.name)
    return int(matched[1]) if matched else 0


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a parameter is cut. counts: into how many parts along each axis. held: file → number of the part in it."""

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    held: Mapping[str, int]

    def begin(self, file: str, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return where the part in a file begins; raise FormatError where it does not fit the whole."""
        if len(part) != len(self.counts) or tuple(n * count for n, count in zip(part, self.counts, strict=True)) != self.shape:
            raise FormatError(f"of shape {list(part)} is no part of {list(self.shape)} cut into {list(self.counts)}")
        number = self.held[file]
        if number >= prod(self.counts):
            raise FormatError(f"is said to be part {number} of {prod(self.counts)}")
        index: list[int] = []
        for count in reversed(self.counts):
            number, along = divmod(number, count)
            index.insert(0, along)
        return tuple(i * n for i, n in zip(index, part, strict=True))


def open(path: Path) -> Checkpoint:
    """Open the checkpoint. Without `metadata.json` the files of several ranks are copies of each other."""
    folder = _folder(path)
    problems: list[Problem] = []
    cuts = _cuts(folder / "metadata.json")
    tensors: list[LogicalTensor] = []
    common = folder / "common.json"
    told: Any = read_json(common) if common.is_file() else {}
    iteration: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    for file in _files(folder):
        try:
            held = read_safetensors(file)[0]
        except FormatError as error:
            problems.append(Problem(str(file), str(error)))
            continue
        for name, array in held.items():
            if name not in cuts and is_scalar(name, array.shape):
                iteration.setdefault(name, scalar(array))
                continue
            try:
                tensors.append(_tensor(name, array, file, cuts.get(name)))
            except FormatError as error:
                problems.append(Problem(str(file), f"{name} {error}"))
        problems += [
            Problem(str(file), f"metadata.json says that it holds {name}, and it does not")
            for name, cut in cuts.items()
            if file.name in cut.held and name not in held
        ]
    problems += [
        Problem(str(folder / lost), "is missing; metadata.json names it")
        for lost in sorted({file for cut in cuts.values() for file in cut.held if not inside(folder, file).is_file()})
    ]
    state: dict[str, dict[str, Any]] = {"iteration": iteration}
    if isinstance(iteration.get("global_step"), int | float):
        state["optimizer"] = {"step": int(iteration["global_step"])}
    return Checkpoint(str(path), "mindformers", gather(tensors), state=state, problems=tuple(problems))


def _tensor(name: str, array: MappedArray, file: Path, cut: _Cut | None) -> LogicalTensor:
    """Return what a file holds of a parameter. One of which no cut is told is whole in each file."""
    slot, weight = split(name)
    shape, begin = array.shape, (0,) * len(array.shape)
    if cut is not None and file.name in cut.held:
        shape, begin = cut.shape, cut.begin(file.name, array.shape)
    piece = Piece(begin, array, file.name, f"rank_{_rank(file)}", name)
    return LogicalTensor(weight, shape, (piece,), slot, native=name)


def _cuts(file: Path) -> dict[str, _Cut]:
    """Return parameter → how it is cut; raise FormatError for a file that does not say it."""
    if not file.is_file():
        return {}
    told = read_json(file)
    try:
        stored: dict[str, dict[str, int]] = {}
        for name, number, copies in _parts(told["storage_data"]):
            stored.setdefault(name, {}).update({str(copy["file_name"]): number for copy in copies})
        return {name: _cut(name, one, stored.get(name, {})) for name, one in told["state_dict_metadata"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{file} does not say how the parameters are cut: {error!r}") from None


def _parts(storage: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Yield name, number of the part, and the files that hold it: `('layers.0.weight', (1,))` is part 1."""
    for key, copies in storage.items():
        matched = _PART.fullmatch(key)
        if matched is None:
            raise ValueError(f"{key[:200]} names no part of a parameter")
        yield matched["name"], int(matched["number"]), copies


def _cut(name: str, told: Mapping[str, Any], held: Mapping[str, int]) -> _Cut:
    if (told.get("layout") or {}).get("interleaved_parallel"):
        raise ValueError(f"{name} is cut in interleaved parts, which are not read")
    shape = tuple(int(n) for n in told["global_shape"])
    counts = tuple(int(n) for n in told["axis_fragmentations"])
    return _Cut(shape, counts, held)
