"""Which model a loop trains, when it is not given: searched among the modules and optimizers that are alive.

Only the dictionaries in which `torch.nn.Module` keeps its parameters and modules are read, so no code of the program runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from trainprobe.engine.capture.optimizers import live_optimizers
from trainprobe.engine.core.held_parameters import Shards, held_by, members, shards_of
from trainprobe.engine.core.live_objects import instances_of, with_subclasses
from trainprobe.engine.core.naming import chunks_of

TOGETHER = 16  # models of one optimizer that are watched together


def model_around(called: Any) -> Any:
    """Return the model that a module belongs to.

    That is the smallest module which holds the module's parameters and, as many as one module can, those of the optimizers that
    step them; the largest module around it where no optimizer of torch.optim holds any of them.
    """
    own = set(parameters_of(called))
    held = {number for numbers in map(held_by, live_optimizers()) if own & numbers for number in numbers}
    if held <= own and held:
        return called
    around = [module for module in _live_modules() if module is not called and own <= set(parameters_of(module))]
    return _best([called, *around], held) if held else max([called, *around], key=lambda m: len(parameters_of(m)))


def model_of(optimizer: Any) -> Any:
    """Return the smallest module that holds most of the parameters of an optimizer; None where none holds any."""
    return _model_with({id(p) for group in optimizer.param_groups for p in group["params"]})


def _model_with(held: set[int]) -> Any:
    """Return the smallest module that holds most of some parameters, by their ids; None where none holds any."""
    best = _best(_live_modules(), held)
    return best if best is not None and held & parameters_of(best).keys() else None


def stepped_together(model: Any) -> Any:
    """Return a model, or a list of models where the optimizers that step it step others too, in the order of its parameters.

    `Adam([*encoder.parameters(), *decoder.parameters()])` trains two models that no module holds.
    """
    own = parameters_of(model).keys()
    held = [number for numbers in map(held_by, live_optimizers()) if not own.isdisjoint(numbers) for number in numbers]
    models, left = [model], {*held} - own
    modules = {id(module) for module in modules_inside(model)}
    while left and len(models) < TOGETHER:
        another = _model_with(left)
        inside = {id(module) for module in modules_inside(another)}
        if another is None or not modules.isdisjoint(inside):  # what is left belongs to no module, or to a part of this one
            break
        models.append(another)
        modules |= inside
        left -= parameters_of(another).keys()
    if len(models) == 1:
        return model
    place = {number: i for i, number in enumerate(held)}
    return sorted(models, key=lambda m: min(place.get(number, len(held)) for number in parameters_of(m)))


def parameters_of(model: Any) -> dict[int, Any]:
    """Return id → parameter of a module, or of a list of modules, and all modules inside."""
    inside = [module for chunk in chunks_of(model) for module in modules_inside(chunk)]
    return _held_by(inside, shards_of(inside))


def has_own_parameters(model: Any) -> bool:
    """Tell whether the parameters of a model are its own: while `functional_call` runs, other tensors stand in their place."""
    inside = (module for chunk in chunks_of(model) for module in modules_inside(chunk))
    return all(isinstance(p, torch.nn.Parameter) for p in _held_by(inside, {}).values())


def has_data(p: Any) -> bool:
    """Tell whether a parameter can be trained: it is no stand-in, on `meta` or fake, by which costs are counted."""
    return not p.is_meta and not isinstance(p, torch._subclasses.FakeTensor)


def _held_by(modules: Iterable[Any], shards: Shards) -> dict[int, Any]:
    known = (module for module in modules if "_parameters" in module.__dict__)
    return {id(p): p for module in known for _, p in members(module, shards)}


def _best(modules: Collection[Any], held: set[int]) -> Any:
    shards = shards_of(modules)
    known = [(module, _held_by(modules_inside(module), shards).keys()) for module in modules]
    return max(known, key=lambda pair: (len(held & pair[1]), -len(pair[1])), default=(None, ()))[0]


def modules_inside(module: Any) -> Iterator[Any]:
    """Yield a module and all modules inside it, each once."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        at = waiting.pop()
        if at is not None and id(at) not in seen:
            seen.add(id(at))
            waiting += at.__dict__.get("_modules", {}).values()
            waiting.append(at.__dict__.get("_actual_script_module"))  # what a traced model keeps all that it has in
            yield at


def _live_modules() -> list[Any]:
    return instances_of(with_subclasses(torch.nn.Module))
