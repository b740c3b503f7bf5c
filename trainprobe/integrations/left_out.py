"""What else a process trains or calls apart from the watched model, in words for the line that ends the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, KeysView
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from trainprobe.engine.core.held_parameters import held_by
from trainprobe.integrations.live_modules import model_of, modules_inside, parameters_of

NAMED = 4  # models that are named at the end; further ones are counted
MORE = "{} more"
SOUGHT = 32  # optimizers whose model is looked for


class LeftOut:
    """Models that other optimizers updated, by name, size and number of updates, and models that were only called.

    in_a_row: how many updates the newest optimizer has made, all of them after the last update of the model that is watched.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._newest: ReferenceType[Any] | None = None
        self._known: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # optimizer → its one counter
        self._trained: list[tuple[str, list[int]]] = []
        self._updated: set[int] = set()  # ids of parameters that some optimizer steps
        self._beside: set[int] = set()  # ids of parameters of other models that an optimizer of the watched model steps
        self._inside: set[int] = set()  # ids of the modules in what was called
        self._called: list[tuple[str, KeysView[int]]] = []  # name and size, ids of its parameters

    def __contains__(self, optimizer: Any) -> bool:
        return optimizer in self._known

    def saw(self, optimizer: Any, begins: bool = False) -> None:
        """Count an update of another model. begins: an optimizer that is seen for the first time may begin a new training."""
        if optimizer not in self._known:
            self._newest, self.in_a_row = (ref(optimizer) if begins else None), 0
            times = self._known[optimizer] = [0]
            self._trained.append((_in_words(optimizer, len(self._trained) < SOUGHT), times))
            self._updated |= held_by(optimizer)
        self._known[optimizer][0] += 1
        self.in_a_row += self._newest is not None and self._newest() is optimizer

    def optimizers(self) -> list[tuple[Any, int]]:
        """Return the optimizers of other models, each with the number of its updates."""
        return [(optimizer, times[0]) for optimizer, times in self._known.items()]

    def interrupted(self) -> None:
        """The model that is watched was updated: no other training has begun."""
        self._newest, self.in_a_row = None, 0

    def beside(self, numbers: set[int]) -> None:
        """Know parameters that an optimizer of the watched model steps and that are none of its own. numbers: their ids."""
        self._beside |= numbers

    def forget(self, optimizer: Any) -> None:
        """Leave out an optimizer whose model is watched from now on."""
        self._updated |= held_by(optimizer)
        times = self._known.pop(optimizer, None)
        self._trained = [pair for pair in self._trained if pair[1] is not times]

    def is_new(self, module: Any) -> bool:
        """Tell whether no module around this one was called before."""
        return id(module) not in self._inside

    def called(self, module: Any, own: Collection[int]) -> bool:
        """See the call of a module that is no part of the model that is watched. own: ids of that model's parameters.

        Return whether it is new and holds all of these parameters and more.
        """
        if not self.is_new(module):
            return False
        self._inside |= {id(inner) for inner in modules_inside(module)}
        numbers = parameters_of(module).keys()
        if all(number in own for number in numbers):
            return False
        self._called = [one for one in self._called if not one[1] <= numbers]  # its parts may have been called before
        self._called.append((f"{type(module).__name__} ({len(numbers)} parameter tensors)", numbers))
        return all(number in numbers for number in own)

    def trained(self) -> str:
        """Return what was trained: "Generator (6 parameter tensors, 30 updates by Adam)"; empty when there was nothing."""
        return _listed([what.format(times[0]) for what, times in self._trained], "what {} more optimizers step")

    def sentences(self, *, trained: bool, called: bool) -> Iterator[str]:
        """Yield what the end of a run says. trained: of what others updated. called: of what was called and not updated."""
        if trained and (names := self.trained()):
            yield f"Also trained here and not watched: {names}; torch_loop.attach(model) watches one more."
        shared = [name for name, numbers in self._called if not numbers.isdisjoint(self._beside)]
        if called and shared:
            yield f"Updated by the optimizer of the watched model and not watched: {_listed(shared, MORE)}."
        known = self._updated | self._beside
        only = [name for name, numbers in self._called if numbers.isdisjoint(known)]
        if called and only:
            yield f"Called in the first step and not watched, as no optimizer updates it: {_listed(only, MORE)}."


def _listed(words: list[str], rest: str) -> str:
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {rest.format(more)}" if more > 0 else "")


def _in_words(optimizer: Any, look: bool) -> str:
    model = model_of(optimizer) if look else None
    name = "parameters of no module" if model is None else type(model).__name__
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return f"{name} ({count} parameter tensors, {{}} updates by {type(optimizer).__name__})"
