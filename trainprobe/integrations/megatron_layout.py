"""Where a Megatron process stands: parallel axes, global layer and expert numbers, and which rectangle a shard is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from trainprobe.engine.core.naming import Rename, chunks_of
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.topology import place_from_environment
from trainprobe.engine.geometry.shards import Shard

Axes = Mapping[str, tuple[int, int]]
TIED = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of this process: its global name and the rectangle of the logical tensor that it is."""

    name: str
    parameter: Any
    shard: Shard


def parallel_axes(chunks: int = 1) -> dict[str, tuple[int, int]]:
    """Return axis → (index, size) from `megatron.core.parallel_state`; axes of size 1 are left out.

    `vpp` tells how many chunks each process holds. `etp` is there only where experts are split otherwise than the rest. The
    `ep` index follows from the others: experts lie across the processes that share the dense parameters.
    """
    from megatron.core import parallel_state as state

    axes = {
        "dp": (state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        "tp": (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        "pp": (state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
        "vpp": (0, chunks),
        "cp": (state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        "ep": (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
    }
    expert_tensor = getattr(state, "get_expert_tensor_parallel_world_size", None)
    if expert_tensor is not None and expert_tensor() not in (axes["tp"][1], 0):
        axes["etp"] = (state.get_expert_tensor_parallel_rank(), expert_tensor())
    return {axis: place for axis, place in axes.items() if place[1] > 1 or axis == "etp"}


def told_by_megatron(model: Any, place: Place | None = None) -> dict[str, Any]:
    """Return what a probe is to know of chunks of a model: place, names over all processes, rectangles of parameters."""
    chunks = chunks_of(model)
    models = [bare(chunk) for chunk in chunks]
    axes = parallel_axes(len(chunks)) if place is None else place.axes
    held = list(held_parameters(models, axes))
    shards = {id(each.parameter): each.shard for each in held}
    return {
        "place": place or place_from_environment(axes),
        "rename": renaming(models),
        "shard_of": lambda p: shards.get(id(p)),
        "parameter_names": {id(each.parameter): each.name for each in held},
    }


# ---- names -------------------------------------------------------------------------------------------------------------


def bare(chunk: Any) -> Any:
    """Return a model chunk without its wrappers (DistributedDataParallel, Float16Module), which hold nothing but `module`."""
    while list(getattr(chunk, "_modules", ())) == ["module"]:
        chunk = chunk.module
    return chunk


def global_names(model: Any) -> dict[str, str]:
    """Return the name of every module of a bare chunk → its name in the whole model, where layers and experts count from 0."""
    names = {"": ""}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if name:
            above, _, last = name.rpartition(".")
            number = _global_number(modules, above, module, last) if last.isdigit() else last
            names[name] = f"{names[above]}.{number}" if names[above] else number
    return names


def _global_number(modules: Mapping[str, Any], above: str, module: Any, last: str) -> str:
    """Return the number of a layer or an expert over all processes; Megatron's own `layer_number` begins at 1."""
    kind = above.rpartition(".")[2]
    if kind == "layers":
        if isinstance(getattr(module, "layer_number", None), int):
            return str(module.layer_number - 1)
        for place, layer in modules[above].named_children():  # a layer that computes nothing has no number: its neighbours have
            if isinstance(getattr(layer, "layer_number", None), int):
                return str(layer.layer_number - 1 - int(place) + int(last))
    if kind == "local_experts":
        layer = modules[above.rpartition(".")[0].rpartition(".")[0]]
        numbers = getattr(layer, "local_expert_indices", None)
        return str(numbers[int(last)]) if numbers else last
    return last


def renaming(models: Sequence[Any]) -> Rename:
    """Return the rule from a module's name in this process to its global one, for bare model chunks.

    With several chunks a name comes with the number of its chunk in front. That number stays only where two chunks hold a
    module of one name: the model itself, the block of layers, the rotary embedding.
    """
    tables = [global_names(model) for model in models]
    if len(tables) == 1:
        return lambda name: tables[0].get(name, name)
    merged: dict[str, str] = {}
    everywhere = [name for table in tables for name in set(table.values())]
    for chunk, table in enumerate(tables):
        for local, name in table.items():
            whole = f"{chunk}.{local}" if local else str(chunk)
            twice = everywhere.count(name) > 1
            merged[whole] = (f"{chunk}.{name}" if name else str(chunk)) if twice else name
    return lambda name: merged.get(name.rstrip("."), name)


# ---- rectangles --------------------------------------------------------------------------------------------------------


def held_parameters(models: Sequence[Any], axes: Axes) -> Iterator[HeldParameter]:
    """Yield every parameter of bare model chunks once, in order.

    Under a pipeline the last stage's copy of a tied embedding carries the embedding's name: it is a replica of it over `pp`.
    """
    seen: set[int] = set()
    for model in models:
        names = global_names(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        for local, parameter in model.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            above, _, last = local.rpartition(".")
            name = f"{names[above]}.{_grouped_number(modules, above, last)}" if above else last
            tied = bool(getattr(parameter, "shared_embedding", False)) and "pp" in axes
            if tied and name == "output_layer.weight":
                name = TIED
            yield HeldParameter(name, parameter, rectangle(local, parameter, modules, axes, tied))


def _grouped_number(modules: Mapping[str, Any], above: str, last: str) -> str:
    """Give `experts.linear_fc1.weight3`, one expert of a grouped linear layer, its number over all processes."""
    stem = last.rstrip("0123456789")
    pieces = above.split(".")
    if stem not in ("weight", "bias") or stem == last or "experts" not in pieces[-2:-1]:
        return last
    numbers = getattr(modules[".".join(pieces[:-2])], "local_expert_indices", None)
    return f"{stem}{numbers[int(last[len(stem) :])]}" if numbers else last


def rectangle(local: str, parameter: Any, modules: Mapping[str, Any], axes: Axes, tied: bool = False) -> Shard:
    """Return which part of the logical tensor a parameter is.

    Two kinds have one dimension more than the parameter itself, because only then they are one rectangle: the first linear
    layer of a gated MLP is [2 (gate, up), ffn, hidden], and all experts of a grouped MLP are [expert, rows, columns].
    """
    above, _, last = local.rpartition(".")
    # without EP, Megatron does not mark the parameters of experts, though they may be split over other ranks than the rest
    expert = not getattr(parameter, "allreduce", True) or "experts" in above.split(".")
    axis = "etp" if expert and "etp" in axes else "tp"
    index, size = axes.get(axis, (0, 1)) if getattr(parameter, "tensor_model_parallel", False) else (0, 1)
    split = getattr(parameter, "partition_dim", -1) if size > 1 else -1
    kept = {"pp", "vpp"} | ({axis} if size > 1 else set()) | ({"ep"} if expert else set())
    replicas = tuple(a for a in axes if a not in kept) + (("pp",) if tied else ())
    config = getattr(modules[""], "config", None)
    gated = bool(getattr(config, "gated_linear_unit", False))
    if last in ("weight1", "weight2") and hasattr(modules[above], "num_local_experts"):
        grouped = _grouped(parameter, last, modules[above], gated, axes.get("ep", (0, 1)), (index, size))
        return replace(grouped, replicas=replicas)
    lengths = list(parameter.shape)
    if gated and above.rpartition(".")[2] == "linear_fc1" and lengths[0] % 2 == 0:
        lengths = [2, lengths[0] // 2, *lengths[1:]]
        split += 1 if split >= 0 else 0
    offset = [index * n if d == split else 0 for d, n in enumerate(lengths)]
    whole = [size * n if d == split else n for d, n in enumerate(lengths)]
    return Shard(tuple(offset), tuple(lengths), tuple(whole), replicas)


def _grouped(parameter: Any, last: str, experts: Any, gated: bool, ep: tuple[int, int], tp: tuple[int, int]) -> Shard:
    """Return the rectangle of all local experts of a grouped MLP.

    weight1 is [expert, hidden, ffn], or [expert, hidden, 2 (gate, up), ffn] if gated; weight2 is [expert, ffn, hidden].
    """
    count = experts.num_local_experts
    hidden = experts.config.hidden_size
    other = parameter.numel() // count // hidden
    lengths = [count, other, hidden]
    if last == "weight1":
        lengths = [count, hidden, 2, other // 2] if gated else [count, hidden, other]
    split = 1 if last == "weight2" else len(lengths) - 1
    offset, whole = [0] * len(lengths), list(lengths)
    for dimension, (index, size) in ((0, ep), (split, tp)):
        offset[dimension], whole[dimension] = index * lengths[dimension], size * lengths[dimension]
    return Shard(tuple(offset), tuple(lengths), tuple(whole))


def piece(shard: Shard, start: int, end: int) -> Shard:
    """Return elements `start` to `end` of a rectangle, as a distributed optimizer cuts it over the data-parallel processes."""
    replicas = tuple(axis for axis in shard.replicas if axis not in ("dp", "cp"))
    within = None if shard.shape == shard.whole else shard
    return Shard((start,), (end - start,), (prod(shard.shape),), replicas, within)
