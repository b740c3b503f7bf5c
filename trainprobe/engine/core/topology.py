"""Where this process stands in the job, taken from the environment or from an integration; never from a collective."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from trainprobe.engine.core.records import Place
from trainprobe.errors import UsageError

AXES = ("dp", "tp", "pp", "vpp", "ep", "cp", "sp")
_MESH_NAMES = {
    "dp": "dp", "data": "dp", "data_parallel": "dp", "dp_shard": "dp", "dp_replicate": "dp", "fsdp": "dp", "replicate": "dp",
    "tp": "tp", "tensor": "tp", "tensor_parallel": "tp", "model": "tp", "pp": "pp", "pipe": "pp", "pipeline": "pp", "ep": "ep",
    "expert": "ep", "cp": "cp", "context": "cp", "sp": "sp",
}  # fmt: skip


def place_from_environment(axes: Mapping[str, tuple[int, int]] | None = None) -> Place:
    """Return this process's Place from torch.distributed when it is initialised, else from RANK and WORLD_SIZE.

    A data-parallel axis of the whole world is assumed when nothing else is known and the world has more than one rank.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    if axes is None:
        axes = {"dp": (rank, world)} if world > 1 else {}
    return Place(rank=rank, world_size=world, axes=dict(axes))


def check_place(place: Place) -> None:
    """Raise UsageError for a place that cannot be, or is not that of this process."""
    known = (*AXES, "etp")
    given: Mapping[str, Any] = place.axes
    for axis, position in given.items():
        whole = isinstance(position, tuple | list) and len(position) == 2 and all(type(n) is int for n in position)
        if axis not in known:
            raise UsageError(f"place: {axis!r} is no parallel axis; known are {', '.join(known)}")
        if not whole or not 0 <= position[0] < position[1]:
            raise UsageError(f"place: {axis} is {position!r}; write (index, size) of this rank, with 0 <= index < size")
    split = prod(size for axis, (_, size) in place.axes.items() if axis in ("dp", "tp", "pp", "cp"))
    if not 0 <= place.rank < place.world_size or place.world_size % split:
        axes = " ".join(f"{axis}{size}" for axis, (_, size) in place.axes.items())
        raise UsageError(f"place: rank {place.rank} of {place.world_size} cannot be split as {axes or 'one'}")
    here = place_from_environment()
    if here.world_size > 1 and (here.rank, here.world_size) != (place.rank, place.world_size):
        raise UsageError(
            f"place: it says rank {place.rank} of {place.world_size}, and this process is rank {here.rank} of {here.world_size}"
        )


def axes_of_parameters(parameters: Iterable[Any], place: Place) -> dict[str, tuple[int, int]]:
    """Return axis → (index, size) as the meshes of DTensor parameters say; those of `place` where they do not tell ranks apart.

    Where no mesh is data parallel, ranks that are on no mesh with this one count as such, the slowest axis.
    """
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters if hasattr(type(p), "placements")}
    axes: dict[str, tuple[int, int]] = {}
    for mesh in meshes.values():
        for axis, found in axes_from_mesh(mesh).items():
            axes[axis] = max(found, axes.get(axis, found), key=lambda each: each[1])  # a mesh may be a part of another
    named = prod(size for _, size in axes.values())
    if axes and "dp" not in axes and named < place.world_size and place.world_size % named == 0:
        axes["dp"] = (place.rank // named, place.world_size // named)
        named = place.world_size
    return axes if axes and named == place.world_size else dict(place.axes)


def axis_of(name: str) -> str:
    """Return the axis that a mesh dimension of this name is, "dp" for one that is not known."""
    return _MESH_NAMES.get(str(name).lower(), "dp")


def axes_from_mesh(mesh: Any) -> dict[str, tuple[int, int]]:
    """Return axis → (index, size) of a torch DeviceMesh with named dimensions; unnamed or unknown ones are left out.

    Several mesh dimensions on one axis (replicate and shard, both data parallel) multiply, first one slowest.
    """
    axes: dict[str, tuple[int, int]] = {}
    names = getattr(mesh, "mesh_dim_names", None) or ()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return axes
    for dim, name in enumerate(names):
        axis = _MESH_NAMES.get(str(name).lower())
        if axis is None:
            continue
        index, size = axes.get(axis, (0, 1))
        axes[axis] = (index * mesh.size(dim) + coordinate[dim], size * mesh.size(dim))
    return axes
