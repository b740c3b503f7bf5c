"""What a model and its optimizers are made of right now: parameter objects, owners, modes. Reads no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainprobe.engine.capture.optimizers import groups_of, parameters_of
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.held_parameters import Shards, members, shards_of
from trainprobe.engine.core.naming import count_outer_wrappers, in_training, logical_name
from trainprobe.monitor.audit.capture.registered import hidden_parameters, repeated_hooks
from trainprobe.monitor.audit.facts.model import ModelFacts, ParameterFact
from trainprobe.monitor.audit.facts.updates import BaseRate, ParameterGroup


def model_facts(
    models: Sequence[Any], optimizers: Sequence[Any], names: Mapping[int, str], *, owners_known: bool
) -> ModelFacts:
    """Return the facts of model chunks and optimizers.

    names: id of parameter → recorded name. owners_known: ownership is known.
    """
    held = {id(p): p for optimizer in optimizers for p in parameters_of(optimizer)}
    everything: dict[int, tuple[Any, list[str]]] = {}
    shards = shards_of(module for model in models for module in model.modules())
    for plain, module in _named_modules(models):
        for short, p in members(module, shards):
            everything.setdefault(id(p), (p, []))[1].append(f"{plain}.{short}" if plain else short)
    for number, model in enumerate(models):
        prefix, outer = _prefix(models, number), _outer(model)
        for raw, p in _every_name(model, shards):
            name = prefix + logical_name(raw, outer_wrappers=outer)
            known = everything.setdefault(id(p), (p, []))[1]
            if name not in known:
                known.append(name)
    parameters = tuple(
        _parameter(p, _named(names.get(key), given), key in held if owners_known else None)
        for key, (p, given) in everything.items()
    )
    strays = tuple((shape_of(p), str(p.dtype)) for key, p in held.items() if key not in everything)
    kinds = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    return ModelFacts(
        parameters,
        modes_of(models),
        strays if owners_known else (),
        _foreign(models, everything),
        kinds,
        _wrapper(models),
        hidden_parameters(models, everything.keys() | held.keys()) if owners_known else (),
        repeated_hooks(models),
        frozenset(name for name, module in _named_modules(models) if drops(module)),
        frozenset(_named(names.get(key), everything[key][1])[0] for key in _adapters(models) if key in everything),
        any(getattr(m, "broadcast_buffers", False) for m in models if type(m).__name__ == "DistributedDataParallel"),
        frozenset(_named(names.get(key), everything[key][1])[0] for key in _embeddings(models, shards) if key in everything),
    )


def _every_name(model: Any, shards: Shards) -> Iterator[tuple[str, Any]]:
    """Yield each parameter by each of its names; a model's own `named_parameters` may leave some out and lack arguments."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield from ((f"{path}.{name}" if path else name, p) for name, p in members(module, shards))


def _embeddings(models: Sequence[Any], shards: Shards) -> Iterator[int]:
    """Yield the ids of the weights of embeddings."""
    for _, module in _named_modules(models):
        if any(kind.__name__ == "Embedding" for kind in type(module).__mro__) and hasattr(module, "weight"):
            yield id(shards.get((id(module), "weight"), module.weight))


def _adapters(models: Sequence[Any]) -> Iterator[int]:
    """Yield the ids of the parameters of adapters that are active on top of a base layer, as PEFT keeps them."""
    for _, module in _named_modules(models):
        kinds = getattr(module, "adapter_layer_names", None)
        if not isinstance(kinds, tuple) or not hasattr(module, "base_layer"):
            continue
        if getattr(module, "merged", False) or getattr(module, "disable_adapters", False):
            continue
        active = getattr(module, "active_adapters", ())
        held = (getattr(module, kind, {}) for kind in kinds)
        for adapter in (one[name] for one in held for name in active if name in one):
            yield from map(id, adapter.parameters() if hasattr(adapter, "parameters") else (adapter,))


def modes_of(models: Sequence[Any]) -> dict[str, bool]:
    """Return module name → whether the module is in training mode."""
    modes: dict[str, bool] = {}
    for name, module in _named_modules(models):
        modes.setdefault(name, in_training(module))
    return modes


def _named_modules(models: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, model in enumerate(models):
        prefix, outer = _prefix(models, number), _outer(model)
        for raw, module in model.named_modules():
            yield prefix + logical_name(raw, outer_wrappers=outer), module


def _prefix(models: Sequence[Any], number: int) -> str:
    return f"{number}." if len(models) > 1 else ""


def _outer(model: Any) -> int:
    return count_outer_wrappers(name for name, _ in model.named_modules() if name)


def drops(module: Any) -> bool:
    """Tell whether a module is a dropout that is not set to 0."""
    share = vars(module).get("p", vars(module).get("drop_prob"))
    return "drop" in type(module).__name__.lower() and isinstance(share, int | float) and share > 0


def bases_of(optimizer: Any, number: int, unstepped: bool) -> tuple[BaseRate, ...]:
    """Return what is known of each of `rates_of`. unstepped: no scheduler of this optimizer has been stepped."""
    waits = unstepped and hasattr(optimizer.step, "_wrapped_by_lr_sched")
    groups = (group for group in groups_of(optimizer) if isinstance(group.get("lr"), float | int))
    return tuple(BaseRate(number, _number(group.get("initial_lr")), waits) for group in groups)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float | int) else float("nan")


def optimizer_groups(optimizers: Sequence[Any], names: Mapping[int, str]) -> tuple[ParameterGroup, ...]:
    """Return the parameter groups of all optimizers with their plain numbers."""
    return tuple(
        ParameterGroup(
            type(optimizer).__name__ if type(optimizer).__module__.startswith("torch.optim") else "",
            frozenset(names[id(p)] for p in group["params"] if id(p) in names),
            {key: value for key, value in group.items() if _plain(value)},
            frozenset(group) - frozenset(getattr(optimizer, "defaults", group)) - {"params"},
        )
        for optimizer in optimizers
        for group in groups_of(optimizer)
    )


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (
        isinstance(value, tuple) and all(isinstance(item, int | float) for item in value)
    )


def _named(recorded: str | None, given: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([recorded, *given] if recorded is not None else given))


def _parameter(p: Any, names: tuple[str, ...], owned: bool | None) -> ParameterFact:
    storage = attempt(_address, p, otherwise=lambda _: 0)
    return ParameterFact(names, id(p), storage, bool(p.requires_grad), shape_of(p), str(p.dtype), owned)


def _address(p: Any) -> int:
    return int(p.data_ptr()) if type(p).__name__ not in ("DTensor", "FakeTensor") else 0


def shape_of(p: Any) -> tuple[int, ...]:
    """Return the shape of a parameter; () of one that has none: nested, or lazy and not used yet."""
    return attempt(lambda: tuple(p.shape), otherwise=lambda _: ())


def _wrapper(models: Sequence[Any]) -> str:
    return next((type(m).__name__ for m in models if type(m).__name__ == "DistributedDataParallel"), "")


def _foreign(models: Sequence[Any], everything: Mapping[int, tuple[Any, list[str]]]) -> tuple[str, ...]:
    """Name trainable parameters that DistributedDataParallel does not reduce although it wraps the model that holds them."""
    out: list[str] = []
    for model in models:
        reduced = getattr(model, "_module_parameters", None)
        if reduced is None or not hasattr(model, "reducer"):
            continue
        known = {id(p) for p in reduced}
        ignored = set(getattr(model, "parameters_to_ignore", ()))
        for key, (p, names) in everything.items():
            if p.requires_grad and key not in known and not ignored.intersection(names):
                out.append(names[0])
    return tuple(out)
