"""Where a DeepSpeed process stands: parallel axes, global expert numbers, and over which ranks a parameter is replicated."""

from __future__ import annotations

import re
from typing import Any

from trainprobe.engine.core.naming import WRAPPERS, Rename
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.topology import place_from_environment

_MPU = {"tp": ("tensor_model_parallel", "model_parallel"), "pp": ("pipeline_model_parallel", "pipe_parallel")}
_EXPERT = re.compile(r"(.*\bdeepspeed_experts)\.(\d+)(.*)")


class DeepSpeedLayout:
    """The places of one engine's process and the replicas of its parameters; nothing here communicates.

    axes: axis → (index, size), those of size 1 left out. Experts lie across the ranks that share the dense parameters, so the
    `ep` index follows from the rank; of layers with several expert-parallel sizes the largest is the axis.
    """

    def __init__(self, engine: Any) -> None:
        self.axes = _axes(engine)
        self._experts = _expert_axis(engine)
        self._tied = _tied_weights(engine)

    def replicas(self, p: Any, *, cut: bool = False) -> tuple[str, ...]:
        """Return the axes over which others hold the same as this process. cut: of its piece of a parameter that ZeRO cuts.

        A dense parameter is shared over `dp` and `ep`, an expert over the ranks with its `ep` index, the weight of a tied layer
        also over `pp`.
        """
        if is_expert(p):
            group, over = str(getattr(p, "group_name", "")), ("dp",)
            if _size(group) == 1:
                over = ("dp", "ep")
            elif group != self._experts:
                over = ()  # its group is no line along an axis
        else:
            over = ("dp", "ep")
        over = () if cut else over
        over += ("pp",) if id(p) in self._tied and not (cut and "dp" in self.axes) else ()
        return tuple(axis for axis in over if axis in self.axes)

    def is_cut_again(self, p: Any) -> bool:
        """Tell whether this is a later stage's copy of a tied weight that ZeRO cuts here otherwise than on the first stage."""
        return id(p) in self._tied and "dp" in self.axes and bool(getattr(p, "ds_pipe_replicated", False))


def place_of(engine: Any) -> Place:
    """Return where this process stands: its data- and expert-parallel index, and those that the engine's `mpu` reports."""
    place = place_from_environment()
    return Place(place.rank, place.world_size, _axes(engine))


def data_parallel(engine: Any) -> tuple[int, int]:
    """Return this process's index among those that hold the same weights, and their number."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    group = getattr(engine, "seq_data_parallel_group", None) or getattr(engine, "data_parallel_group", None)
    return dist.get_rank(group), dist.get_world_size(group)


def is_expert(p: Any) -> bool:
    """Tell whether a parameter is an expert's, which the processes of a data-parallel group do not share."""
    return getattr(p, "allreduce", True) is False


def renaming(model: Any) -> Rename | None:
    """Return the rule from a module's name to the one in which experts count over all ranks; None where there are none.

    Expert i of rank r of an expert-parallel group is r × (experts a rank) + i, as in DeepSpeed's checkpoints.
    """
    first: dict[str, int] = {}
    for name, layer in model.named_modules():
        group, count = getattr(layer, "ep_group", None), getattr(layer, "num_local_experts", None)
        if group is not None and count is not None and hasattr(layer, "experts"):
            path = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            first[f"{path}.experts.deepspeed_experts".lstrip(".")] = _rank_in(group) * count
    if not any(first.values()):
        return None

    def rename(name: str) -> str:
        found = _EXPERT.fullmatch(name)
        if found is None:
            return name
        path, number, rest = found.groups()
        start = next((first[known] for known in first if path == known or path.endswith(f".{known}")), 0)
        return f"{path}.{start + int(number)}{rest}"

    return rename


def _axes(engine: Any) -> dict[str, tuple[int, int]]:
    axes = {"dp": data_parallel(engine)}
    mpu = getattr(engine, "mpu", None)
    for axis, names in _MPU.items():
        for name in names:
            rank, world = (getattr(mpu, f"get_{name}_{what}", None) for what in ("rank", "world_size"))
            if rank is not None and world is not None:
                axes[axis] = (rank(), world())
                break  # a pipeline's "model_parallel" means its stages too
    group = _expert_axis(engine)
    if group is not None:
        axes["ep"] = _expert_place(group)
    return {axis: place for axis, place in axes.items() if place[1] > 1}


def _expert_axis(engine: Any) -> str | None:
    """Return the name of the largest expert-parallel group of a model with experts."""
    names = {p.group_name for p in engine.module.parameters() if is_expert(p) and hasattr(p, "group_name")}
    return max(names, key=_size, default=None)


def _expert_place(group: str) -> tuple[int, int]:
    from deepspeed.utils import groups

    return groups._get_expert_parallel_rank(group), groups._get_expert_parallel_world_size(group)


def _size(group: str) -> int:
    last = group.rpartition("_")[2]  # ep_size_N
    return int(last) if last.isdigit() else 0


def _rank_in(group: Any) -> int:
    import torch.distributed as dist

    return dist.get_rank(group) if dist.is_initialized() else 0


def _tied_weights(engine: Any) -> frozenset[int]:
    """Return the ids of the parameters that stages of a pipeline share (TiedLayerSpec): only those DeepSpeed keeps equal."""
    model = engine.module
    tied = getattr(model, "tied_comms", None) or {}
    weights = ((model.tied_modules[key], name) for key, tie in tied.items() for name in tie["weight_attr"])
    return frozenset(id(model._recursive_getattr(module, name)) for module, name in weights)
