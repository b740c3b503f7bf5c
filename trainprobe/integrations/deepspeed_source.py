"""Where DeepSpeed keeps a parameter's tensors: slices of flat partitions under ZeRO, else copies in full precision.

Every slice is read where it lies: nothing here communicates, gathers a parameter, or touches an attribute of a module. The
`safe_get_full_*` functions of DeepSpeed are collectives that some ranks enter while others raise; they are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from trainprobe.engine.core.sources import Part
from trainprobe.engine.geometry.shards import Shard
from trainprobe.integrations.deepspeed_layout import DeepSpeedLayout


@dataclass(frozen=True, slots=True)
class SteppedSlice:
    """The part of a parameter that this process steps.

    stepped: the tensor that the basic optimizer holds. start: its first element that belongs to the parameter; None where all
    of it does, in the parameter's shape. count: how many elements. reduced: the gradient that the optimizer is about to take,
    joined over the ranks, neither clipped nor freed of the loss scale; None when there is none now.
    """

    stepped: Any
    start: int | None
    count: int
    shard: Shard
    reduced: Any = None

    def of(self, tensor: Any) -> Any:
        """Return the parameter's elements of a tensor that is laid out as `stepped` is."""
        return tensor if self.start is None else tensor.reshape(-1).narrow(0, self.start, self.count)


class DeepSpeedSource:
    """Hands out values, gradients, master weights and optimizer state of one engine in one process, for all ZeRO stages.

    names: returns id of parameter → logical name. arriving: the parameter and gradient that the moment "unreduced" is about.
    micro: the micro-batch under which that one is kept. stepping: ids of the tensors that the optimizer steps now; ZeRO steps
    one group after the other. Their gradients and state alone are handed out; where it is empty, values alone; None is all.
    """

    def __init__(self, engine: Any, names: Callable[[], Mapping[int, str]]) -> None:
        self.engine = engine
        self.names = names
        self.arriving: tuple[Any, Any] | None = None
        self.micro = 0
        self.stepping: frozenset[int] | None = None
        self.before_clipping = False  # "before_step" comes before the optimizer's own gradients exist
        self.parameters = list(dict(engine.module.named_parameters()).values())
        self.layout = DeepSpeedLayout(engine)

    def parts(self, moment: str) -> Iterator[Part]:
        """Yield the parts that can be seen at `moment`; a parameter that other processes update has none of the optimizer's."""
        names = self.names()
        if moment == "unreduced":
            yield from self._unreduced(names)
            return
        for p in self.parameters:
            name = names.get(id(p))
            if name is None:
                continue
            held = self.slice_of(p)
            if moment == "unclipped":
                if held is not None and held.reduced is not None:
                    yield Part(name, "grad_unclipped", held.reduced, held.shard, loss_scale(self.engine))
                continue
            if not self.stepping:
                yield from self._value(p, name)
            if held is None or (self.stepping is not None and id(held.stepped) not in self.stepping):
                continue
            if moment == "before_step":
                gradient = held.reduced if self.before_clipping else _gradient(held)
                if gradient is not None:
                    yield Part(name, "grad", gradient, held.shard)
            yield from self._state(p, name, held)

    def _unreduced(self, names: Mapping[int, str]) -> Iterator[Part]:
        if self.arriving is not None and id(self.arriving[0]) in names:
            p, gradient = self.arriving
            shape = tuple(gradient.shape)
            shard = Shard((0,) * len(shape), shape, shape)
            yield Part(names[id(p)], "grad_unreduced", gradient, shard, loss_scale(self.engine), self.micro)

    def scalars(self) -> dict[str, float]:
        """Return the learning rate, and those of parameter groups where it differs."""
        rates = [float(group["lr"]) for group in getattr(self.engine.optimizer, "param_groups", ()) if "lr" in group]
        out = {"lr": rates[0]} if rates else {}
        return out | {f"lr/{i}": rate for i, rate in enumerate(rates) if rate != rates[0]}

    def slice_of(self, p: Any) -> SteppedSlice | None:
        """Return what this process steps of a parameter, or None; anew each time, as loading replaces tensors."""
        optimizer = self.engine.optimizer
        if hasattr(p, "ds_id"):
            return _stage3_slice(optimizer, p)
        if hasattr(p, "_hp_mapping"):
            if self.layout.is_cut_again(p):
                return None  # each element is reported once
            return _partitioned_slice(optimizer, p, self.layout.replicas(p, cut=True))
        if not p.requires_grad:
            return None
        shard = self._whole(p)
        if hasattr(optimizer, "fp16_groups"):
            return _half_precision_slice(optimizer, p, shard)
        return SteppedSlice(p, None, p.numel(), shard, p.grad)

    def _whole(self, p: Any) -> Shard:
        shape = tuple(p.shape)
        return Shard((0,) * len(shape), shape, shape, self.layout.replicas(p))

    def _value(self, p: Any, name: str) -> Iterator[Part]:
        held = getattr(p, "ds_tensor", None)
        if held is None:
            yield Part(name, "value", p, self._whole(p))
            return
        shard = _stage3_shard(p)
        if shard.shape[0] and _is_here(held):
            yield Part(name, "value", held.narrow(0, 0, shard.shape[0]), shard)

    def _state(self, p: Any, name: str, held: SteppedSlice) -> Iterator[Part]:
        """Yield the master weight, where the model's own is of another dtype, and what the optimizer keeps."""
        stepped = held.stepped
        if stepped.dtype != p.dtype:
            yield Part(name, "main_value", held.of(stepped), held.shard)
        for slot, tensor in (self.engine.basic_optimizer.state.get(stepped) or {}).items():
            if getattr(tensor, "shape", None) is None:
                continue
            if tensor.numel() == stepped.numel():
                yield Part(name, str(slot), held.of(tensor), held.shard)
            elif tensor.numel() == 1:
                yield Part(name, str(slot), tensor)


def loss_scale(engine: Any) -> float:
    """Return what gradients are multiplied by until the optimizer takes them; 1 where nothing scales."""
    optimizer = engine.optimizer
    settings = getattr(optimizer, "loss_scale_config", None)
    scale = getattr(settings, "cur_scale", None)
    for name in ("loss_scale", "cur_scale"):
        scale = getattr(optimizer, name, None) if scale is None else scale
    return float(scale) if isinstance(scale, int | float) else 1.0


# ---- one layout each -----------------------------------------------------------------------------------------------------


def _partitioned_slice(optimizer: Any, p: Any, replicas: tuple[str, ...]) -> SteppedSlice | None:
    """ZeRO 1 and 2, and the optimizer of bfloat16 with float32 accumulation: a slice of a flat tensor per group."""
    mapping = p._hp_mapping
    if mapping is None:
        return None
    flats = getattr(optimizer, "fp32_groups_flat_partition", None)
    flats = optimizer.single_partition_of_fp32_groups if flats is None else flats
    there, here = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    shard = Shard((there.start,), (there.numel,), (p.numel(),), replicas)
    gradients = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict
    group = gradients.get(mapping.param_group_index)
    reduced = None
    if group:
        reduced = group[p._index_in_param_group].reshape(-1)
        if reduced.numel() != there.numel:
            reduced = reduced.narrow(0, there.start, there.numel)
    return SteppedSlice(flats[mapping.param_group_index], here.start, here.numel, shard, reduced)


def _stage3_slice(optimizer: Any, p: Any) -> SteppedSlice | None:
    """ZeRO 3: a slice of a flat tensor per sub-group, padded at the end of the parameter."""
    key = optimizer.get_param_id(p)
    if key not in optimizer.grad_position:
        return None  # frozen
    shard = _stage3_shard(p)
    count = shard.shape[0]
    group, start, _ = optimizer.grad_position[key]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    if count == 0 or flat is None or flat.numel() < start + count:
        return None  # swapped out
    reduced = None
    if getattr(optimizer, "offload_optimizer", False):
        reduced = None if flat.grad is None else flat.grad.narrow(0, start, count)
    elif optimizer.averaged_gradients.get(group):
        members = optimizer.fp16_groups[group]
        index = next(i for i, member in enumerate(members) if member is p)
        reduced = optimizer.averaged_gradients[group][index].reshape(-1).narrow(0, 0, count)
    return SteppedSlice(flat, start, count, shard, reduced)


def _stage3_shard(p: Any) -> Shard:
    import torch.distributed as dist

    size = p.ds_tensor.ds_numel
    begin = min(dist.get_rank(getattr(p, "ds_process_group", None)) * size, p.ds_numel)
    return Shard((begin,), (min(size, p.ds_numel - begin),), (p.ds_numel,))


def _is_here(held: Any) -> bool:
    status = getattr(held, "status", None)
    return getattr(status, "name", "AVAILABLE") == "AVAILABLE" and held.numel() >= held.ds_numel


def _half_precision_slice(optimizer: Any, p: Any, shard: Shard) -> SteppedSlice | None:
    """Half precision without ZeRO: a float32 copy a parameter, or one flat copy a group, on every rank."""
    flat = getattr(optimizer, "fp32_groups_flat", None)
    for i, group in enumerate(optimizer.fp16_groups):
        start = 0
        for j, member in enumerate(group):
            if member is p:
                if flat is None:
                    return SteppedSlice(optimizer.fp32_groups[i][j], None, p.numel(), shard, p.grad)
                row = Shard((0,), (p.numel(),), (prod(shard.whole),), shard.replicas)
                return SteppedSlice(flat[i], start, p.numel(), row, p.grad)
            start += member.numel()
    return None


def _gradient(held: SteppedSlice) -> Any:
    gradient = held.stepped.grad
    return None if gradient is None else held.of(gradient)


def tensors_of(optimizer: Any) -> frozenset[int]:
    """Return the ids of the tensors that an optimizer holds now."""
    return frozenset(id(p) for p in chain.from_iterable(group["params"] for group in optimizer.param_groups))
