"""What a model is made of, to be seen again in the next step: modules and parameters, their names, which want gradients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from trainprobe.engine.core.held_parameters import Shards, members


class ModelStructure:
    """Remembers the members of modules by identity. Nothing is read of a tensor but whether it wants a gradient.

    Parameters that FSDP2 shards are left out: it exchanges them for the whole ones and back while a step runs. `holds` is asked
    in each step, so it calls no function of Python for a module or a parameter.
    """

    def __init__(self, modules: Iterable[Any], shards: Shards) -> None:
        held: list[dict[str, Any]] = []
        wanting: list[Any] = []
        for module in modules:
            own = [p for _, p in members(module, shards)]
            sharded = any(hasattr(p, "_local_tensor") for p in own)
            holds = (module._modules,) if sharded else (module._modules, module._parameters)
            held += [each for each in holds if isinstance(each, dict)]  # a script module has others
            wanting += own
        self._held, self._sizes, self._before = tuple(held), tuple(map(len, held)), _flat(held)
        self._wanting, self._required = tuple(wanting), tuple(map(_requires_grad, wanting))

    def holds(self) -> bool:
        """Tell whether the model is still made of the same."""
        return (
            tuple(map(len, self._held)) == self._sizes
            and all(map(is_, _flat(self._held), self._before))
            and tuple(map(_requires_grad, self._wanting)) == self._required
        )


def _flat(held: Iterable[dict[str, Any]]) -> tuple[Any, ...]:
    """Return each name and, behind it, the member, of all modules."""
    return tuple(chain.from_iterable(chain.from_iterable(map(_items, held))))


_items, _requires_grad = methodcaller("items"), attrgetter("requires_grad")
