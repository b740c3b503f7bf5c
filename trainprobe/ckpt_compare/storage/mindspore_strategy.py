"""Reads MindSpore's strategy files, which say how the parameters of a parallel training were cut over its ranks.

Of each parameter: the matrix of the devices of a pipeline stage, for each dimension the axes of that matrix along which it is
cut (counted from the right, the first one coarsest; -1 for none), and the further cut of dimension 0 by the optimizer's
parallelism, over the axes that are left. Files are protobuf or JSON; of a training with pipeline stages there is one for each
stage, or one of all (`merge_pipeline_strategys`), in which a name begins with its stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.storage.mapped import read_json
from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError, MissingExtra

_MOST = 1 << 28  # bytes
_OF_A_STAGE = re.compile(r"(\d+)-(.+)")
_ALL_THAT_ARE_LEFT = -1
# message → (number, name, type, label, message of the field) of its fields that are read; as in descriptor.proto
_INT, _MESSAGE = 5, 11
_FIELDS: dict[str, tuple[tuple[int, str, int, int, str], ...]] = {
    "Dims": ((1, "dim", 3, 3, ""),),  # int64, which int32 and uint32 are written as too
    "Layouts": (
        (1, "dev_matrix", _MESSAGE, 3, "Dims"),
        (2, "tensor_map", _MESSAGE, 3, "Dims"),
        (6, "shard_step", _INT, 1, ""),
        (7, "shard_size", _INT, 1, ""),
    ),
    "Item": ((1, "param_name", 9, 1, ""), (2, "layouts", _MESSAGE, 1, "Layouts")),
    "Map": ((3, "items", _MESSAGE, 3, "Item"),),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one parameter is cut.

    devices: the matrix of a stage, last axis fastest. axes: of each dimension, those that cut it, from the right. shards: of
    the optimizer's cut, 1 for none. stage: the pipeline stage, where the file says it.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    shards: int
    stage: int | None = None

    def place(self, rank: int, local: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the whole shape, and where the part of a rank begins in it."""
        if len(local) != len(self.axes):
            raise FormatError(f"the strategy file knows {len(self.axes)} dimensions of a part of shape {list(local)}")
        within, at = rank % prod(self.devices), [0] * len(self.devices)
        for axis in range(len(self.devices) - 1, -1, -1):
            within, at[axis] = divmod(within, self.devices[axis])
        cut = [[len(self.devices) - 1 - axis for axis in axes] for axes in self.axes]
        along = [self._along(axes, at) for axes in cut]
        parts, index = [count for count, _ in along], [which for _, which in along]
        if self.shards != 1 and local:
            left = [axis for axis in range(len(self.devices)) if not any(axis in axes for axes in cut)]
            count, which = self._along(left, at)
            shards = count if self.shards == _ALL_THAT_ARE_LEFT else self.shards
            index[0] = index[0] * shards + which % shards
            parts[0] *= shards
        shape = tuple(size * count for size, count in zip(local, parts, strict=True))
        return shape, tuple(size * i for size, i in zip(local, index, strict=True))

    def _along(self, axes: Iterable[int], at: Sequence[int]) -> tuple[int, int]:
        """Return how many parts some axes of the matrix make, and which of them a device has."""
        parts, index = 1, 0
        for axis in axes:
            parts, index = parts * self.devices[axis], index * self.devices[axis] + at[axis]
        return parts, index


def read_strategy(path: Path) -> dict[str, list[Layout]]:
    """Return parameter → its layouts, one for each stage that has it.

    Raises FormatError for a file that is none, and MissingExtra without protobuf.
    """
    found: dict[str, list[Layout]] = {}
    for name, devices, axes, shards in _from_json(path) if path.suffix == ".json" else _from_protobuf(path):
        matched = _OF_A_STAGE.fullmatch(name)
        stage, name = (int(matched[1]), matched[2]) if matched else (None, name)
        known = {axis for several in axes for axis in several}
        if not devices or min(devices) < 1 or any(not 0 <= axis < len(devices) for axis in known):
            raise FormatError(f"{path}: the layout of {name} is none: devices {list(devices)}, axes {list(axes)}")
        found.setdefault(name, []).append(Layout(devices, axes, shards or 1, stage))
    return found


def layout_of(layouts: Sequence[Layout], rank: int) -> Layout:
    """Return the layout that a parameter has on a rank: that of its pipeline stage."""
    return next((one for one in layouts if one.stage == rank // prod(one.devices)), layouts[0])


_Told = tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...], int]  # name, devices, axes of each dimension, shards


def _axes(entries: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the axes of each dimension; an entry is one axis, or those of a dimension that several axes cut."""
    nested = (entry if isinstance(entry, list | tuple) else (entry,) for entry in entries)  # pyright: ignore[reportUnknownVariableType]
    return tuple(tuple(int(axis) for axis in several if axis != -1) for several in nested)


def _from_json(path: Path) -> Iterable[_Told]:
    held = read_json(path)
    items: Any = held.get("parallel_layout_item") if isinstance(held, dict) else None  # pyright: ignore[reportUnknownMemberType]
    if not isinstance(items, Mapping):
        raise FormatError(f"{path} is no strategy file of MindSpore: it has no `parallel_layout_item`")
    try:
        return [_from_item(str(name), item) for name, item in items.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise FormatError(f"{path} is no strategy file of MindSpore: {fault!r}") from None


def _from_item(name: str, item: Any) -> _Told:
    shards = int(item["opt_weight_shard_size"]) if item["opt_weight_shard_step"] else 0
    return name, tuple(map(int, item["dev_matrix"])), _axes(item["tensor_map"]), shards


def _from_protobuf(path: Path) -> Iterable[_Told]:
    kind, error = _message()
    try:
        told = kind.FromString(read_bounded(path, _MOST))
    except error as fault:
        raise FormatError(f"{path} is no strategy file of MindSpore: {fault}") from None
    for item in told.items:
        several = item.layouts
        devices = tuple(several.dev_matrix[0].dim) if several.dev_matrix else ()
        maps = [tuple(one.dim) for one in several.tensor_map]
        entries = [one for one in maps if one] if len(maps) > 1 else next(iter(maps), ())
        yield item.param_name, devices, _axes(entries), several.shard_size if several.shard_step else 0


def _message() -> tuple[Any, Any]:
    """Return the class of the outermost message, and the error that it raises."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
    except ImportError as missing:  # pragma: no cover
        raise MissingExtra("protobuf", "npu", "reading MindSpore's strategy files") from missing
    file = descriptor_pb2.FileDescriptorProto(name="trainprobe/strategy.proto", package="trainprobe.strategy", syntax="proto2")
    for name, fields in _FIELDS.items():
        made: Any = file.message_type.add(name=name)
        for number, field, kind, label, of in fields:
            about = made.field.add(name=field, number=number, type=kind, label=label)
            if of:
                about.type_name = f".trainprobe.strategy.{of}"
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("trainprobe.strategy.Map")), message.DecodeError
