"""What a step computes with: what loss functions and modules are given, and arithmetic beside the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainprobe.engine.arrays.without_dispatch import in_a_transform
from trainprobe.engine.capture.audit.loss_inputs import LossInputs, named_arguments
from trainprobe.engine.capture.audit.model_calls import ModelCalls
from trainprobe.engine.capture.audit.observers import let, observer, undo
from trainprobe.engine.capture.audit.outer_products import OuterProducts
from trainprobe.engine.capture.features.module_inputs import ModuleInputs
from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.tape import Tape


class Given:
    """Listens to all of that while a step is audited. backwards: returns how many backward passes have begun."""

    def __init__(self, guard: Guard, calls: ModelCalls, backwards: Callable[[], int]) -> None:
        self._guard = guard
        self._losses = observer(guard, LossInputs, lambda own: LossInputs(own, backwards, lambda: calls.asleep))
        self._modules = observer(guard, ModuleInputs, lambda _: ModuleInputs())
        beside = lambda: calls.asleep or calls.within > 0  # noqa: E731
        self._outer = observer(guard, OuterProducts, lambda own: OuterProducts(own, beside))
        calls.on_call = self._model_called
        calls.on_module = self._module_called

    def begin(self, tape: Tape) -> None:
        """Look at a step."""
        let(self._guard, self._losses.begin, tape)
        let(self._guard, self._modules.begin, tape)
        let(self._guard, self._outer.begin)

    def end(self) -> None:
        """Look no more; what was seen stays until `take`."""
        undo(self._guard, self._losses.end)
        undo(self._guard, self._modules.end)
        undo(self._guard, self._outer.end)

    def take(self) -> dict[str, Any]:
        """Return the facts of the step by their names, once it has crossed to the host; without those of what has failed."""
        outer = let(self._guard, self._outer.take)
        taken = {
            "losses": let(self._guard, self._losses.take),
            "ungraded": let(self._guard, self._losses.take_ungraded),
            "sequences": let(self._guard, self._modules.sequences),
            "masks": let(self._guard, self._modules.masks),
            "scales": let(self._guard, self._modules.scales),
            "moved_twice": let(self._guard, self._modules.moved_twice),
            "outer": outer if self._modules.has_one_output else (),
        }
        return {name: facts for name, facts in taken.items() if facts is not None}

    def _model_called(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = named_arguments(model, args, kwargs)
        given = let(self._guard, self._losses.model_called, named)
        if given is not None and not in_a_transform():
            attempt(self._modules.model_called, model, named, given, otherwise=_left_out)

    def _module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not in_a_transform():
            attempt(self._modules.module_called, name, module, args, kwargs, otherwise=_left_out)


def _left_out(_: Exception) -> None:
    """Leave out what cannot be looked at: a value of an odd kind (nested, sparse, of a class of the program)."""
