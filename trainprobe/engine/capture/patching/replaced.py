"""A function of a library that is replaced for a while and put back, in whatever order several probes end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainprobe.engine.capture.patching import compiled_regions


class Replaced:
    """Puts `ours` in the place of `owner.name` at once; `back` takes it out again.

    ours: a Python function that calls what `getattr(owner, name)` was before. Where somebody has put another function over
    it meanwhile, that one stays, and ours leaves when a probe's function above it does; until then `ours.ended` tells it that
    it must only pass on. traced: compiled code would meet it, and it steps aside for that.
    """

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any], *, traced: bool = False) -> None:
        self._owner = owner
        self._name = name
        self._ours: Any = ours
        self._ours.below = vars(owner).get(name, _INHERITED)  # not getattr: it would unwrap what binds a method to its object
        self._ours.ended = False
        self._traced = traced
        setattr(owner, name, ours)
        if traced:
            compiled_regions.register(self)

    def back(self) -> None:
        """Put back what was there; safe to call twice."""
        self._ours.ended = True
        compiled_regions.forget(self)
        if vars(self._owner).get(self._name) is self._ours:
            below = self._ours.below
            while getattr(below, "ended", False):
                below = below.below
            self._place(below)

    def wake(self) -> bool:
        """Serve again where `back` could not take ours out, because another stands above it; False where it has left.

        Ours would otherwise be put above the other one too, and the two would pile up with each rest.
        """
        if not self._ours.ended:
            return True
        at: Any = vars(self._owner).get(self._name)
        while at is not self._ours and at is not None:
            at = getattr(at, "below", None)
        if at is None:
            return False
        self._ours.ended = False
        if self._traced:
            compiled_regions.register(self)
        return True

    def suspend(self) -> bool:
        """Put back what was there for a while; False where somebody else's function stands over ours."""
        if vars(self._owner).get(self._name) is not self._ours:
            return False
        self._place(self._ours.below)
        return True

    def restore(self) -> None:
        """Stand in the place again that `suspend` left; one that was put `back` meanwhile stays away."""
        if not self._ours.ended:
            self._ours.below = vars(self._owner).get(self._name, _INHERITED)
            setattr(self._owner, self._name, self._ours)

    def _place(self, function: Any) -> None:
        if function is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, function)


_INHERITED = object()
