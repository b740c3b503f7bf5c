"""Where Megatron keeps a parameter's tensors: main_grad in buckets, master weights and state in nested optimizers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainprobe.engine.core.sources import Part
from trainprobe.engine.geometry.shards import Shard
from trainprobe.integrations.megatron_layout import HeldParameter, piece

REGION = "model-parallel-rng"  # Megatron's name


@dataclass(frozen=True, slots=True)
class Owned:
    """What an optimizer of this process steps for a parameter, and which elements of it that stands for."""

    optimizer: Any
    main: Any
    start: int | None = None
    end: int | None = None


class MegatronSource:
    """Hands out values, gradients, master weights and optimizer state of one process.

    reducing: the parameters whose gradients are about to be joined over the ranks. loss_scale: what unreduced gradients are
    multiplied by. values_lag: after a step, values are gathered from the other processes only when the next forward needs them.
    """

    def __init__(self, held: Sequence[HeldParameter], optimizer: Any) -> None:
        self.held = tuple(held)
        self.optimizers = innermost(optimizer)
        self.reducing: tuple[HeldParameter, ...] = ()
        self.loss_scale = 1.0
        self.values_lag = _gathers_late(optimizer)

    def parts(self, moment: str) -> Iterator[Part]:
        """Yield the parts that can be seen at `moment`; a parameter that others update has none of the optimizer's."""
        if moment == "unreduced":
            for held in self.reducing:
                grad = getattr(held.parameter, "main_grad", None)
                if grad is not None:
                    yield Part(held.name, "grad_unreduced", grad, replace(held.shard, replicas=()), self.loss_scale)
            return
        owners = self.owners()
        for held in self.held:
            owned = owners.get(id(held.parameter))
            if moment == "unclipped":
                yield from _gradient(held, owned, "grad_unclipped")
                continue
            if not (moment == "after_step" and self.values_lag):
                yield Part(held.name, "value", held.parameter, held.shard)
            if moment == "before_step":
                yield from _gradient(held, owned, "grad")
            if owned is not None:
                yield from _state(held, owned)

    def scalars(self) -> dict[str, float]:
        """Return the learning rate, and those of parameter groups where it differs."""
        rates = [float(group["lr"]) for optimizer in self.optimizers for group in _groups(optimizer) if "lr" in group]
        out = {"lr": rates[0]} if rates else {}
        return out | {f"lr/{i}": rate for i, rate in enumerate(rates) if rate != rates[0]}

    def random_region(self) -> int:
        """Return a fingerprint of the random state for what is split over tp; 0 where Megatron keeps none."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracker: Any = get_cuda_rng_tracker()
        state = tracker.get_states().get(REGION)
        return zlib.crc32(memoryview(state.cpu().numpy())) if hasattr(state, "numpy") else 0

    def owners(self) -> dict[int, Owned]:
        """Return id of a model's parameter → what is stepped for it; anew each time, as loading may replace tensors."""
        return {id(parameter): owned for optimizer in self.optimizers for parameter, owned in _owned(optimizer)}


def innermost(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain that hold parameters: Megatron's own kinds, or plain torch ones."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [inner for link in chained for inner in innermost(link)]
    return [] if optimizer is None or getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def loss_scaler(optimizer: Any) -> Any:
    """Return the gradient scaler of a training in half precision, or None."""
    scalers = (getattr(inner, "grad_scaler", None) for inner in innermost(optimizer))
    return next((scaler for scaler in scalers if scaler is not None), None)


def _gathers_late(optimizer: Any) -> bool:
    return any(
        getattr(getattr(inner, "ddp_config", None), "overlap_param_gather", False) and _is_distributed(inner)
        for inner in innermost(optimizer)
    )


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "model_param_group_index_map")


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    inner = getattr(optimizer, "optimizer", optimizer)
    return list(getattr(inner, "param_groups", ()))


def _owned(optimizer: Any) -> Iterator[tuple[Any, Owned]]:
    inner = getattr(optimizer, "optimizer", optimizer)
    if _is_distributed(optimizer):
        for parameter, (group, place) in optimizer.model_param_group_index_map.items():
            spread = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, Owned(optimizer, inner.param_groups[group]["params"][place], spread.start, spread.end)
        return
    mixed = zip(getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True)
    known: set[int] = set()
    for models, mains in mixed:
        for parameter, main in zip(models, mains, strict=True):
            known.add(id(main))
            yield parameter, Owned(optimizer, main)
    for group in _groups(optimizer):
        for parameter in group["params"]:
            if id(parameter) not in known:
                yield parameter, Owned(optimizer, parameter)


def _shard(held: HeldParameter, owned: Owned) -> Shard:
    return held.shard if owned.start is None or owned.end is None else piece(held.shard, owned.start, owned.end)


def _gradient(held: HeldParameter, owned: Owned | None, slot: str) -> Iterator[Part]:
    """Yield the gradient as the optimizer sees it; a precision-aware one is handed `decoupled_grad`."""
    if owned is None or owned.start == owned.end is not None:
        return
    grad = getattr(owned.main, "decoupled_grad", None)
    grad = owned.main.grad if grad is None else grad
    if grad is not None:
        yield Part(held.name, slot, grad, _shard(held, owned))


def _state(held: HeldParameter, owned: Owned) -> Iterator[Part]:
    """Yield the master weight, where there is one, and what the optimizer keeps for it."""
    shard = _shard(held, owned)
    if owned.main.dtype != held.parameter.dtype:
        yield Part(held.name, "main_value", owned.main, shard)
    inner = getattr(owned.optimizer, "optimizer", owned.optimizer)
    unscaled = getattr(inner, "get_unscaled_state", None) if _keeps_master_weights(owned.optimizer) else None
    for slot, tensor in (inner.state.get(owned.main) or {}).items():
        if getattr(tensor, "shape", None) is None:
            continue
        value = unscaled(owned.main, slot) if unscaled is not None else tensor
        name = "main_value" if slot == "master_param" else str(slot)
        yield Part(held.name, name, value, shard if value.numel() == owned.main.numel() else None)


def _keeps_master_weights(optimizer: Any) -> bool:
    """Tell whether the inner optimizer keeps master weights itself, in scaled formats of its own (precision-aware)."""
    config = getattr(optimizer, "config", None)
    names = ("use_precision_aware_optimizer_no_fp8_or_ds_fp8", "use_precision_aware_optimizer")
    return bool(next((getattr(config, name) for name in names if hasattr(config, name)), False))
