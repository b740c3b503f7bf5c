"""Pipelines of torch.distributed.pipelining: where a rank stands in one, and the pass that only learns shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.live_objects import instances_of, with_subclasses
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.topology import axes_of_parameters, place_from_environment
from trainprobe.run.probe import Probe

_STAGE = "torch.distributed.pipelining.stage"
_LEARNS = (
    "_prepare_forward_infra",
    "_prepare_backward_infra",
)  # methods that run a stage on made numbers, before its first step


class Pipeline:
    """The stages of a model on this rank; none where it is not split by torch.distributed.pipelining."""

    def __init__(self, model: Any) -> None:
        modules = {id(m) for chunk in chunks_of(model) if hasattr(chunk, "modules") for m in chunk.modules()}
        self.stages = [stage for stage in _live_stages() if id(stage.submod) in modules]
        self._model = model
        self._replaced: list[Replaced] = []

    def place(self) -> Place:
        """Return where this process stands: on `pp` by the group of its stages, and data parallel with other pipelines."""
        import torch.distributed as dist

        here, stage = place_from_environment(), self.stages[0]
        ranks = dist.get_process_group_ranks(stage.group) if stage.group is not None else list(range(here.world_size))
        axes = _meshes(self._model, here)
        axes["pp"] = (stage.group_rank, stage.group_size)
        if "dp" not in axes and len(axes) == 1 and stage.group_size < here.world_size:
            step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            index = ranks[0] // (step * len(ranks)) * step + ranks[0] % step
            axes["dp"] = (index, here.world_size // stage.group_size)
        if len(self.stages) > 1:
            axes["vpp"] = (0, len(self.stages))
        return Place(here.rank, here.world_size, axes)

    def rest_while_learning(self, probe: Probe) -> None:
        """Record nothing of the passes by which stages learn the shapes that they are sent."""
        for kind in {kind for stage in self.stages for kind in type(stage).__mro__}:
            for name in _LEARNS:
                if name in vars(kind):
                    self._replaced.append(Replaced(kind, name, self._resting(vars(kind)[name], probe)))

    def close(self) -> None:
        """Put everything back."""
        for replaced in self._replaced:
            replaced.back()
        self._replaced.clear()

    def _resting(self, original: Callable[..., Any], probe: Probe) -> Callable[..., Any]:
        def learn(stage: Any, *args: Any, **kwargs: Any) -> Any:
            if learn.ended or not any(stage is own for own in self.stages):  # type: ignore[attr-defined]
                return original(stage, *args, **kwargs)
            probe.pause()
            try:
                return original(stage, *args, **kwargs)
            finally:
                probe.resume()

        return learn


def _live_stages() -> list[Any]:
    base = getattr(sys.modules.get(_STAGE), "_PipelineStageBase", None)
    if base is None:
        return []
    found = [x for x in instances_of(with_subclasses(base)) if hasattr(x, "submod")]
    return sorted(found, key=lambda stage: stage.stage_index)


def _meshes(model: Any, here: Place) -> dict[str, tuple[int, int]]:
    """Return the axes that the meshes of DTensors name, without the ranks that a pipeline tells apart."""
    parameters: Sequence[Any] = [p for chunk in chunks_of(model) for p in chunk.parameters() if hasattr(type(p), "placements")]
    if not parameters:
        return {}
    named = axes_of_parameters(parameters, Place(here.rank, 0))  # no world: nothing is added
    return {axis: at for axis, at in named.items() if axis != "pp"}
