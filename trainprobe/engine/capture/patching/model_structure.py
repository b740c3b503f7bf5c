"""What a model is made of, to be seen again in the next step: modules and parameters, their names, which want gradients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any


class ModelStructure:
    """Remembers the members of modules by identity. Nothing is read of a tensor but whether it wants a gradient.

    Parameters that FSDP2 shards are left out: it exchanges them for the whole ones and back while a step runs.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        held: list[dict[str, Any]] = []
        wanting: list[Any] = []
        for module in modules:
            own = list(module._parameters.values())
            sharded = any(hasattr(p, "_local_tensor") for p in own)
            members = (module._modules,) if sharded else (module._modules, module._parameters)
            held += [each for each in members if isinstance(each, dict)]  # a script module has others
            wanting += [p for p in own if p is not None]
        self._held, self._before = tuple(held), tuple(map(_flat, held))
        self._wanting, self._required = tuple(wanting), tuple(p.requires_grad for p in wanting)

    def holds(self) -> bool:
        """Tell whether the model is still made of the same."""
        return all(
            2 * len(members) == len(before) and all(map(is_, _flat(members), before))
            for members, before in zip(self._held, self._before, strict=True)
        ) and all(p.requires_grad == wants for p, wants in zip(self._wanting, self._required, strict=True))


def _flat(members: dict[str, Any]) -> tuple[Any, ...]:
    """Return each name and, behind it, the member."""
    return tuple(chain.from_iterable(members.items()))
