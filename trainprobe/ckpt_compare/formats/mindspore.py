"""MindSpore checkpoints: `.ckpt` and safetensors files, and MindFormers' folders of one such file a rank.

Optimizer states carry the parameter's name behind a prefix (`adam_m.`, `moment1.`, …) and are filed under it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.mindspore_names import is_scalar, split
from trainprobe.ckpt_compare.optimizer_names import scalar
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Piece, Problem, Source, gather
from trainprobe.ckpt_compare.storage import mindspore_protobuf as protobuf
from trainprobe.ckpt_compare.storage.mapped import MappedArray, read_json
from trainprobe.ckpt_compare.storage.mindspore_strategy import Layout, layout_of, read_strategy
from trainprobe.ckpt_compare.storage.safetensors_file import is_safetensors, read_safetensors
from trainprobe.engine.compare.number_formats import number_format
from trainprobe.errors import FormatError, MissingExtra

_JOINED = "param_name_map.json"  # beside the files into which MindSpore has joined those of all ranks
_RANK = re.compile(r"rank_(\d+)")


def sniff(path: Path) -> bool:
    """A MindSpore `.ckpt` or safetensors file, or a folder of them (directly, or in `rank_N` folders)."""
    return any(_knows(file) for _, file in _files(path)[:1])


def _knows(file: Path) -> bool:
    if file.suffix == ".safetensors":
        return is_safetensors(file) and read_safetensors(file)[1].get("format") == "ms"
    return file.suffix == ".ckpt" and protobuf.looks_like_mindspore(file)


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return the checkpoint files with their ranks ("" for those of no rank): the newest one of each rank."""
    if path.is_file():
        return [("", path)]
    if not path.is_dir():
        return []
    ranks = sorted((p for p in path.glob("rank_*") if _RANK.fullmatch(p.name)), key=lambda p: int(p.name[5:]))
    found = [(rank.name, file) for rank in ranks if (file := _newest(rank)) is not None]
    if found:
        return found
    joined = sorted(path.glob("*.safetensors")) if (path / _JOINED).is_file() else []
    if joined:
        return [("", file) for file in joined if _knows(file)]
    alone = _newest(path)
    return [("", alone)] if alone is not None else []


def _lost(path: Path, held: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each file that lacks a parameter which MindSpore has written into it as it joined ranks."""
    if not (path / _JOINED).is_file():
        return
    told = read_json(path / _JOINED)
    told = told.get("weight_map", told) if isinstance(told, dict) else {}  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    missing: dict[str, list[str]] = {}
    for name, file in told.items():  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if name not in held:
            missing.setdefault(str(file), []).append(str(name))  # pyright: ignore[reportUnknownArgumentType]
    for file, names in missing.items():
        yield Problem(str(path / file), f"should hold {len(names)} tensors that are not there, among them {names[0]}")


def _newest(folder: Path) -> Path | None:
    files = [f for f in folder.iterdir() if f.suffix in (".ckpt", ".safetensors") and f.is_file() and _knows(f)]
    return max(files, key=lambda f: [int(n) for n in re.findall(r"\d+", f.stem)], default=None)


def open(path: Path) -> Checkpoint:
    """Open a MindSpore checkpoint. Several rank files are copies of each other (data parallel).

    Where strategy files lie beside them they are parts, whose places those files say; where they cannot be read, each rank is a
    tensor's own.
    """
    files = _files(path)
    problems: list[Problem] = []
    cut, layouts = _strategy(path, problems) if len(files) > 1 else (None, {})
    tensors: list[LogicalTensor] = []
    state: dict[str, dict[str, Any]] = {"iteration": {}}
    for rank, file in files:
        try:
            held = dict(_read(file, problems))
        except FormatError as error:
            problems.append(Problem(str(file), str(error)))
            continue
        for name, (shape, pieces) in held.items():
            if is_scalar(name, shape):
                state["iteration"].setdefault(name, scalar(pieces[0].source))
                continue
            slot, weight = split(name)
            told = layouts.get(name, layouts.get(weight))
            begin = (0,) * len(shape)
            if told is not None:
                shape, begin = layout_of(told, int(rank[5:])).place(int(rank[5:]), shape)
            elif cut is not None and not layouts:
                weight = f"{rank}.{weight}"
            copies = tuple(
                Piece(tuple(a + b for a, b in zip(p.offset, begin, strict=True)), p.source, p.where, rank) for p in pieces
            )
            tensors.append(LogicalTensor(weight, shape, copies, slot, native=name))
    problems += _lost(path, {tensor.native for tensor in tensors} | {*state["iteration"]})
    steps = state["iteration"].get("global_step")
    if steps is not None:
        state["optimizer"] = {"step": int(steps)}
    notes = (f"cut by {cut}, which is not read: ranks are compared one by one, with ranks of the same name",)
    return Checkpoint(
        str(path),
        "mindspore",
        gather(tensors),
        state=state,
        problems=tuple(problems),
        notes=() if cut is None or layouts else notes,
    )


def _strategy(path: Path, problems: list[Problem]) -> tuple[Path | None, dict[str, list[Layout]]]:
    """Return a file that says how the rank files were cut, and what all of them say; one of each pipeline stage may be there.

    They lie beside the rank files, or in `strategy/` there.
    """
    places = (path, path / "strategy", path.parent / "strategy")
    found = [
        f for place in places if place.is_dir() for f in sorted(place.glob("*strategy*")) if f.suffix in (".ckpt", ".json")
    ]
    layouts: dict[str, list[Layout]] = {}
    for file in found:
        try:
            for name, told in read_strategy(file).items():
                layouts.setdefault(name, []).extend(told)
        except (FormatError, MissingExtra) as error:
            problems.append(Problem(str(file), str(error)))
            return file, {}
    return (found[0] if found else None), layouts


Held = tuple[tuple[int, ...], list[Piece]]


def _read(file: Path, problems: list[Problem]) -> Iterator[tuple[str, Held]]:
    if file.suffix == ".safetensors":
        for name, array in read_safetensors(file)[0].items():
            yield name, (array.shape, [_piece(array, file, name)])
        return
    fault = protobuf.checksum_fault(file)
    if fault:
        problems.append(Problem(str(file), fault))
    yield from _protobuf(file).items()


def _protobuf(file: Path) -> Mapping[str, Held]:
    """Return the tensors of a `.ckpt`; a tensor that was cut for its size comes back as one with several pieces."""
    found: dict[str, Held] = {}
    for value in protobuf.read_values(file):
        if value.dtype not in protobuf.DTYPES:
            continue  # text, which belongs to append_dict
        fmt = number_format(protobuf.DTYPES[value.dtype])
        shape = protobuf.shape_of(value, fmt.itemsize)
        rows = protobuf.rows_in(value, fmt.itemsize) if shape else 0
        before = found.setdefault(value.tag, (shape, []))[1]
        row = sum(p.shape[0] for p in before) if shape else 0
        part = (rows, *shape[1:]) if shape else ()
        array = MappedArray(str(file), value.start, part, fmt)
        if value.length != array.span:
            raise FormatError(f"{value.tag} of shape {list(shape)} {fmt.name} has {value.length} bytes")
        offset = (row, *(0 for _ in shape[1:])) if shape else ()
        before.append(_piece(array, file, value.tag, offset))
    return found


def _piece(source: Source, file: Path, name: str, offset: tuple[int, ...] | None = None) -> Piece:
    return Piece(
        offset if offset is not None else (0,) * len(source.shape), source, f"{Path(file.parent.name) / file.name}: {name}"
    )
