"""The parameters of a model, where `fully_shard` (FSDP2) may have put gathered ones in the place of those that are trained.

It does so while a module runs. Behind a forward of the root, or of a module that is not resharded, they stay there until a
backward pass. What optimizers step, and what has a name, is the shard. Its private fields are those of torch 2.4 to 2.13; where
they are not found, a module has the parameters that it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import Any

Shards = Mapping[tuple[int, str], Any]  # (id of a module, short name of a parameter) → the shard that is trained there


def managed_by(modules: Iterable[Any]) -> Iterator[Any]:
    """Yield each `FSDPParam` of modules that `fully_shard` was applied to: what keeps a shard and the gathered parameter."""
    for module in modules:
        state = module._get_fsdp_state() if hasattr(type(module), "_get_fsdp_state") else None
        single = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
        for group in getattr(state, "_fsdp_param_groups", [single] if single is not None else []):
            yield from (p for p in group.fsdp_params if hasattr(p, "sharded_param"))


def shards_of(modules: Iterable[Any]) -> Shards:
    """Return the shards that modules train, those that they share by each of their places."""
    found: dict[tuple[int, str], Any] = {}
    for managed in managed_by(modules):
        place = getattr(managed, "_module_info", None)
        if place is not None:
            shared = zip(place.shared_modules, place.shared_param_names, strict=True)
            found |= {(id(m), name): managed.sharded_param for m, name in ((place.module, place.param_name), *shared)}
    return found


def members(module: Any, shards: Shards) -> list[tuple[str, Any]]:
    """Return the parameters that a module itself has, by their short names."""
    own = [(name, p) for name, p in module._parameters.items() if p is not None]
    return [(name, shards.get((id(module), name), p)) for name, p in own] if shards else own


def parameters_in(models: Iterable[Any]) -> list[Any]:
    """Return each parameter of models once, in their order."""
    modules = [module for model in models for module in model.modules()]
    shards = shards_of(modules)
    return list({id(p): p for module in modules for _, p in members(module, shards)}.values())


def held_by(optimizer: Any) -> KeysView[int]:
    """Return the ids of the parameters that an optimizer of torch.optim holds, in its order."""
    return {id(p): None for group in optimizer.__dict__.get("param_groups", ()) for p in group["params"]}.keys()
