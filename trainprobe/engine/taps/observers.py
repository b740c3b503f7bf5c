"""The observers of the audit: each looks at one thing of a step, and where it fails, the audit goes on without it.

The facts of an observer that was left out are those of a step in which it saw nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trainprobe.engine.core.guard import Guard

T = TypeVar("T")
_RELEASES = ("end", "stop")  # methods by which an observer takes away what it has installed


def observer(guard: Guard, kind: type[T], make: Callable[[Guard], T]) -> T:
    """Make an observer with a guard of its own, whose first fault has the observer look no more."""
    own = guard.of(part_of_observer(kind))
    made = make(own)
    for name in _RELEASES:
        if (release := getattr(made, name, None)) is not None:
            own.on_trip(release)
    return made


def let(guard: Guard, call: Callable[..., T], *args: Any) -> T | None:
    """Call a method of an observer; return None where the observer has failed, now or before."""
    return guard.part(_part(call), call, *args)


def undo(guard: Guard, call: Callable[..., Any]) -> None:
    """Call a method that takes away what an observer has installed, also where the observer has failed."""
    guard.of(_part(call)).undo(call)


def part_of_observer(kind: type) -> str:
    """Return the name that a class of observers has as a part of the tool (see `engine.core.guard.Guard.of`)."""
    return f"the audit's {kind.__name__}"


def _part(call: Callable[..., Any]) -> str:
    return part_of_observer(type(getattr(call, "__self__", None)))
