"""Models that one loop trains beside the first, each by an optimizer of its own: each is watched by a loop of its own.

A generator and a discriminator, an actor and its critics. Their optimizers step in any ratio, so each model has its own steps:
from its forward to its own update. What another model's loss leaves in it belongs to the step that clears it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakSet

from torch.nn import Module

from trainprobe.engine.core.naming import chunks_of
from trainprobe.integrations.live_modules import model_of, modules_inside, stepped_together

MOST = 8  # models that are watched beside the first one


class Loop(Protocol):
    """What watches one model."""

    @property
    def findings(self) -> Any:
        """What it found so far."""

    def watches(self, optimizer: Any) -> bool:
        """Tell whether an optimizer steps its model."""
        ...

    def close(self) -> None:
        """End it."""


class ModelsBeside:
    """Loops for further models. watch: makes one for (model, optimizer, updates so far); returns None where it cannot."""

    def __init__(self, watch: Callable[[Any, Any, int], Loop | None]) -> None:
        self._watch = watch
        self._loops: list[Loop] = []
        self._tried: WeakSet[Any] = WeakSet()
        self._inside: set[int] = set()  # ids of the modules that are watched

    def __bool__(self) -> bool:
        """Tell whether any model is watched here."""
        return bool(self._loops)

    def holds(self, optimizer: Any) -> bool:
        """Tell whether an optimizer steps a model that is watched here."""
        return any(loop.watches(optimizer) for loop in self._loops)

    def add(self, optimizers: Iterable[tuple[Any, int]], first: Any) -> Iterator[Any]:
        """Watch the models of optimizers, given with their numbers of updates; yield those whose model is watched now.

        first: the model of the loop itself. A model that shares modules with another one is left out.
        """
        for optimizer, updates in optimizers:
            if self.holds(optimizer):
                yield optimizer
            elif optimizer not in self._tried and len(self._loops) < MOST:
                self._tried.add(optimizer)
                model = model_of(optimizer)
                if model is not None and self._add(stepped_together(model), optimizer, updates, _modules_of(first)):
                    yield optimizer

    def _add(self, model: Any, optimizer: Any, updates: int, known: set[int]) -> bool:
        inside = _modules_of(model)
        loop = self._watch(model, optimizer, updates) if inside.isdisjoint(known | self._inside) else None
        if loop is None:
            return False
        self._loops.append(loop)
        self._inside |= inside
        return True

    def close(self) -> list[Any]:
        """End all of them; return what they found."""
        for loop in self._loops:
            loop.close()
        found = self.findings
        self._loops.clear()
        return found

    @property
    def findings(self) -> list[Any]:
        """What was found so far."""
        return [finding for loop in self._loops for finding in loop.findings]


def _modules_of(model: Any) -> set[int]:
    return {id(module) for chunk in chunks_of(model) for module in modules_inside(chunk)}


def name_of(model: Any) -> str:
    """Return what the program that is running calls a model, or several: its variable or attribute, else its class."""
    return " and ".join(_variable(module) or type(module).__name__ for module in chunks_of(model))


def _wraps(value: Any, module: Any) -> bool:
    return isinstance(value, Module) and value._modules.get("module") is module


def _variable(module: Any) -> str | None:
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("trainprobe.", "torch.")):
            variables: Mapping[str, Any] = frame.f_locals
            own = getattr(variables.get("self"), "__dict__", {})
            for names in (variables, own, frame.f_globals):
                for name, value in list(names.items()):
                    if name != "self" and (value is module or _wraps(value, module)):
                        return name
        frame = frame.f_back
    return None
