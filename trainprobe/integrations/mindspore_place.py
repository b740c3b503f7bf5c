"""Where a process stands in a MindSpore job, and on which parallel axes.

The sizes come from the parallel configuration of a model of MindFormers, else from MindSpore's own settings (data-parallel
mode, number of pipeline stages). Ranks are laid out as MindSpore does: pipeline stages are the slowest; within a stage the
device matrix is (dp, cp, tp), the last one fastest; experts lie across dp.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import mindspore

from trainprobe.engine.core.records import Place

# axis → what the configurations of MindFormers call its size, of its Legacy and of its Mcore models
_SIZES = {
    "dp": ("data_parallel", "data_parallel_size"),
    "cp": ("context_parallel", "context_parallel_size"),
    "tp": ("model_parallel", "tensor_model_parallel_size"),
    "pp": ("pipeline_stage", "pipeline_model_parallel_size"),
    "ep": ("expert_parallel", "expert_model_parallel_size"),
}
Axes = dict[str, tuple[int, int]]


def place_of_process() -> Place:
    """Return rank and world from mindspore.communication once it is initialised, else from what msrun set.

    The whole world is taken as data parallel.
    """
    rank, world = int(os.environ.get("RANK_ID", "0")), int(os.environ.get("RANK_SIZE", "1"))
    if mindspore.communication.GlobalComm.INITED:
        rank, world = mindspore.communication.get_rank(), mindspore.communication.get_group_size()
    return Place(rank=rank, world_size=world, axes={"dp": (rank, world)} if world > 1 else {})


def declared_place(model: Any) -> Place | None:
    """Return the place with its axes as the training is configured; None where no configuration tells them."""
    here = place_of_process()
    if here.world_size == 1:
        return None
    for sizes in (_of_configuration(model), _of_settings(here.world_size)):
        axes = axes_of(sizes, here.rank, here.world_size)
        if axes:
            return Place(rank=here.rank, world_size=here.world_size, axes=axes)
    return None


def axes_of(sizes: Mapping[str, int], rank: int, world: int) -> Axes:
    """Return axis → (index, size) of a rank, for axes of more than one rank; nothing where the sizes do not make up the world.

    sizes: of dp, cp, tp, pp and ep; an axis that is left out has size 1.
    """
    dp, cp, tp, pp, ep = (max(1, sizes.get(axis, 1)) for axis in ("dp", "cp", "tp", "pp", "ep"))
    if dp * cp * tp * pp != world or dp % ep:
        return {}
    within = rank % (dp * cp * tp)
    at = {"dp": within // (cp * tp), "cp": within // tp % cp, "tp": within % tp, "pp": rank // (dp * cp * tp)}
    at["ep"] = at["dp"] % ep
    known = {"dp": dp, "cp": cp, "tp": tp, "pp": pp, "ep": ep}
    return {axis: (at[axis], size) for axis, size in known.items() if size > 1}


def _of_configuration(model: Any) -> dict[str, int]:
    """Return the sizes that a model of MindFormers is configured with."""
    config = getattr(model, "config", None)
    for settings in (getattr(config, "parallel_config", None), config):
        if settings is None:
            continue
        sizes = {axis: _whole(settings, names) for axis, names in _SIZES.items()}
        if any(size > 1 for size in sizes.values()):
            return sizes
    return {}


def _of_settings(world: int) -> dict[str, int]:
    """Return the sizes by MindSpore's parallel mode: the whole world, or the ranks of a stage, are data parallel."""
    if mindspore.get_auto_parallel_context("parallel_mode") == "data_parallel":
        return {"dp": world}
    stages = int(mindspore.get_auto_parallel_context("pipeline_stages") or 1)
    return {"pp": stages, "dp": world // stages} if stages > 1 else {}


def _whole(settings: Any, names: tuple[str, ...]) -> int:
    found = [settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None) for name in names]
    return next((size for size in found if isinstance(size, int) and not isinstance(size, bool)), 1)
