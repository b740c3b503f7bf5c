"""A function of a library that is replaced for a while and put back, in whatever order several probes end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replaced:
    """Puts `ours` in the place of `owner.name` at once; `back` takes it out again.

    ours: a Python function that calls what `getattr(owner, name)` was before. Where somebody has put another function over
    it meanwhile, that one stays, and ours leaves when a probe's function above it does; until then `ours.ended` tells it that
    it must only pass on.
    """

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._ours: Any = ours
        self._ours.below = vars(owner).get(name, _INHERITED)  # not getattr: it would unwrap what binds a method to its object
        self._ours.ended = False
        setattr(owner, name, ours)

    def back(self) -> None:
        """Put back what was there; safe to call twice."""
        self._ours.ended = True
        if vars(self._owner).get(self._name) is self._ours:
            below = self._ours.below
            while getattr(below, "ended", False):
                below = below.below
            if below is _INHERITED:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, below)


_INHERITED = object()
