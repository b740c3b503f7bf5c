"""Reads MindSpore's strategy files, which say how the parameters of a parallel training were cut over its ranks.

Of each parameter: the matrix of the devices of a pipeline stage, for each dimension the axis of that matrix along which it is
cut (counted from the right, -1 for none), and the further cut of dimension 0 by the optimizer's parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError, MissingExtra

_MOST = 1 << 28  # bytes
# message → (number, name, type, label) of its fields that are read; types and labels as in descriptor.proto
_REQUIRED_INT, _MESSAGE = 5, 11
_FIELDS: dict[str, tuple[tuple[int, str, int, int, str], ...]] = {
    "Dims": ((1, "dim", 3, 3, ""),),  # int64, which int32 and uint32 are written as too
    "Layouts": (
        (1, "dev_matrix", _MESSAGE, 3, "Dims"),
        (2, "tensor_map", _MESSAGE, 3, "Dims"),
        (6, "shard_step", _REQUIRED_INT, 1, ""),
        (7, "shard_size", _REQUIRED_INT, 1, ""),
    ),
    "Item": ((1, "param_name", 9, 1, ""), (2, "layouts", _MESSAGE, 1, "Layouts")),
    "Map": ((3, "items", _MESSAGE, 3, "Item"),),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one parameter is cut. devices: the matrix of a stage, last axis fastest. axes: of each dimension, from the right."""

    devices: tuple[int, ...]
    axes: tuple[int, ...]
    shard_step: int
    shard_size: int

    def place(self, rank: int, local: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the whole shape, and where the part of a rank begins in it."""
        if len(local) != len(self.axes):
            raise FormatError(f"the strategy file knows {len(self.axes)} dimensions of a part of shape {list(local)}")
        within, at = rank % prod(self.devices), [0] * len(self.devices)
        for axis in range(len(self.devices) - 1, -1, -1):
            within, at[axis] = divmod(within, self.devices[axis])
        parts, index = [1] * len(local), [0] * len(local)
        for dimension, axis in enumerate(self.axes):
            if axis >= 0:
                parts[dimension] = self.devices[len(self.devices) - 1 - axis]
                index[dimension] = at[len(self.devices) - 1 - axis]
        if self.shard_size > 1 and local:
            index[0] = index[0] * self.shard_size + rank % prod(self.devices) // self.shard_step % self.shard_size
            parts[0] *= self.shard_size
        shape = tuple(size * count for size, count in zip(local, parts, strict=True))
        return shape, tuple(size * i for size, i in zip(local, index, strict=True))


def read_strategy(path: Path) -> dict[str, Layout]:
    """Return parameter → layout. Raises FormatError for a file that is none, and MissingExtra without protobuf."""
    kind, error = _message()
    try:
        told = kind.FromString(read_bounded(path, _MOST))
    except error as fault:
        raise FormatError(f"{path} is no strategy file of MindSpore: {fault}") from None
    return {item.param_name: _layout(path, item) for item in told.items}


def _layout(path: Path, item: Any) -> Layout:
    several = item.layouts
    devices, axes = (tuple(one[0].dim) if one else () for one in (several.dev_matrix, several.tensor_map))
    if not devices or min(devices) < 1 or any(not -1 <= axis < len(devices) for axis in axes):
        raise FormatError(f"{path}: the layout of {item.param_name} is none: devices {list(devices)}, axes {list(axes)}")
    return Layout(devices, axes, max(several.shard_step, 1), max(several.shard_size, 1))


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
