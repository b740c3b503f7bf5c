"""What a step computes with: what loss functions and modules are given, batches of loaders, and arithmetic beside the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainprobe.engine.arrays.torch_apart import in_a_transform
from trainprobe.engine.guard import Guard, attempt
from trainprobe.engine.tape import Tape
from trainprobe.engine.taps.loaders import LoaderWatch
from trainprobe.engine.taps.loss_inputs import LossInputs, named_arguments
from trainprobe.engine.taps.model_calls import ModelCalls
from trainprobe.engine.taps.module_inputs import ModuleInputs
from trainprobe.engine.taps.outer_products import OuterProducts


class Given:
    """Listens to all of that while a step is audited. backwards: returns how many backward passes have begun."""

    def __init__(self, guard: Guard, calls: ModelCalls, backwards: Callable[[], int]) -> None:
        self._losses = LossInputs(guard, backwards, lambda: calls.asleep)
        self._modules = ModuleInputs()
        self._outer = OuterProducts(guard, lambda: calls.asleep or calls.within > 0)
        self._loaders = LoaderWatch(guard)
        self._handed_out = (0, 0)
        calls.on_call = self._model_called
        calls.on_module = self._module_called

    def start(self) -> None:
        """Learn of loaders from now on."""
        self._loaders.start()

    def stop(self) -> None:
        """Leave nothing behind."""
        self._loaders.stop()

    def begin(self, tape: Tape) -> None:
        """Look at a step."""
        self._losses.begin(tape)
        self._modules.begin(tape)
        self._outer.begin()

    def end(self) -> None:
        """Look no more; what was seen stays until `take`."""
        self._losses.end()
        self._modules.end()
        self._outer.end()
        self._handed_out = self._loaders.handed_out()

    def take(self) -> dict[str, Any]:
        """Return the facts of the step by their names, once it has crossed to the host."""
        handed_out, workers = self._handed_out
        outer = self._outer.take()
        return {
            "losses": self._losses.take(),
            "ungraded": self._losses.take_ungraded(),
            "sequences": self._modules.sequences(),
            "masks": self._modules.masks(),
            "scales": self._modules.scales(),
            "moved_twice": self._modules.moved_twice(),
            "outer": outer if self._modules.has_one_output else (),
            "handed_out": handed_out,
            "workers": workers,
        }

    def _model_called(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = named_arguments(model, args, kwargs)
        given = self._losses.model_called(named)
        if not in_a_transform():
            attempt(self._modules.model_called, model, named, given, otherwise=_left_out)

    def _module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not in_a_transform():
            attempt(self._modules.module_called, name, module, args, kwargs, otherwise=_left_out)


def _left_out(_: Exception) -> None:
    """Leave out what cannot be looked at: a value of an odd kind (nested, sparse, of a class of the program)."""
