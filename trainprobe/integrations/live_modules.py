"""Which model a loop trains, when nobody says so: looked for among the modules and optimizers that are alive.

Only the dictionaries in which `torch.nn.Module` keeps its parameters and modules are read, so no code of the program runs.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

NAMED = 4  # models that are named at the end; further ones are counted
SOUGHT = 32  # optimizers whose model is looked for


class LeftOut:
    """What other optimizers updated in this process, each model by its name, its size and how often."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # optimizer → its one counter
        self._found: list[tuple[str, list[int]]] = []

    def __contains__(self, optimizer: Any) -> bool:
        return optimizer in self._known

    def saw(self, optimizer: Any) -> None:
        """Count an update."""
        if optimizer not in self._known:
            times = self._known[optimizer] = [0]
            self._found.append((_in_words(optimizer, len(self._found) < SOUGHT), times))
        self._known[optimizer][0] += 1

    def words(self) -> str:
        """Return what there was: "Generator (6 tensors, 30 updates by Adam)"; empty when there was nothing."""
        named = [f"{what.format(times[0])}" for what, times in self._found[:NAMED]]
        more = len(self._found) - len(named)
        return ", ".join(named) + (f" and what {more} more optimizers step" if more else "")


def _in_words(optimizer: Any, look: bool) -> str:
    model = model_of(optimizer) if look else None
    name = "parameters of no module" if model is None else type(model).__name__
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return f"{name} ({count} parameter tensors, {{}} updates by {type(optimizer).__name__})"


def model_around(called: Any) -> Any:
    """Return the model that a module belongs to.

    That is the smallest module which holds the module's parameters and, as many as one module can, those of the optimizers that
    step them; the largest module around it where no optimizer of torch.optim holds any of them.
    """
    own = set(parameters_of(called))
    held = {number for numbers in _held_by_optimizers() if own & numbers for number in numbers}
    if held <= own and held:
        return called
    around = [module for module in _live_modules() if module is not called and own <= set(parameters_of(module))]
    return _best([called, *around], held) if held else max([called, *around], key=lambda m: len(parameters_of(m)))


def model_of(optimizer: Any) -> Any:
    """Return the smallest module that holds most of the parameters of an optimizer; None where none holds any."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    best = _best(_live_modules(), held)
    return best if best is not None and held & parameters_of(best).keys() else None


def parameters_of(module: Any) -> dict[int, Any]:
    """Return id → parameter of a module and all modules inside it."""
    return {id(p): p for inner in _inside(module) for p in inner.__dict__.get("_parameters", {}).values() if p is not None}


def _best(modules: Collection[Any], held: set[int]) -> Any:
    known = [(module, parameters_of(module).keys()) for module in modules]
    return max(known, key=lambda pair: (len(held & pair[1]), -len(pair[1])), default=(None, ()))[0]


def _inside(module: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        at = waiting.pop()
        if at is not None and id(at) not in seen:
            seen.add(id(at))
            waiting += at.__dict__.get("_modules", {}).values()
            yield at


def _live_modules() -> list[Any]:
    return [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]


def _held_by_optimizers() -> Iterator[set[int]]:
    for x in gc.get_objects():
        if issubclass(type(x), torch.optim.Optimizer):
            yield {id(p) for group in x.__dict__.get("param_groups", ()) for p in group["params"]}
