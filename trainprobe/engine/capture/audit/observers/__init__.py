"""The observers of the audit: each looks at one thing of a step, and where it fails, the audit goes on without it.

Each file here holds one subclass of `Observer`, and is found by being here: a new fact of a step needs its field in
`StepFacts`, the observer that sees it, and the relation that judges it. The facts of an observer that was left out are those of
a step in which it saw nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trainprobe.engine.core.guard import Guard
from trainprobe.engine.tape import Tape

T = TypeVar("T")
_RELEASES = ("end", "stop")  # methods by which an observer takes away what it has installed


@dataclass(frozen=True, slots=True)
class Audited:
    """What an observer may ask of the training. names: id of parameter → recorded name. models: the chunks of the model.

    due: whether a relation is checked at this step. inside: whether the model runs, in training. tape: of the step that is
    audited. plain: whether gradients are those of the parameters. at_address: name of the parameter that lies at an address, of
    the pieces of a flat buffer that an optimizer steps. world_size: how many ranks there are.
    """

    names: Callable[[], Mapping[int, str]]
    models: Callable[[], Sequence[Any]]
    due: Callable[[str], bool]
    inside: Callable[[], bool]
    tape: Callable[[], Tape | None]
    plain: Callable[[], bool]
    at_address: Callable[[int], str]
    world_size: Callable[[], int]


class Observer:
    """See the module text. Every event does nothing unless an observer defines it. guard: the observer's own."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        self._guard = guard
        self._audited = audited

    def start(self) -> None:
        """The run begins, or goes on with another model."""

    def begin(self) -> None:
        """An audited step begins."""

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """The gradients of these parameters are whole and not yet clipped."""

    def before_update(self, tape: Tape) -> None:
        """An optimizer is about to step; the gradients are those of the parameters, in full."""

    def steps(self, optimizer: Any) -> None:
        """This optimizer is about to step, whoever keeps the gradients."""

    def stepped(self) -> None:
        """It has stepped."""

    def end(self) -> None:
        """The step has ended: take away what `begin` installed. Called also where the observer has failed."""

    def facts(self) -> Mapping[str, Any]:
        """Return fields of `StepFacts`, once the step has crossed to the host."""
        return {}

    def stop(self) -> None:
        """The run has ended: take away what `start` installed. Called also where the observer has failed."""


class Observers:
    """All observers of an audit."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        self._guard = guard
        self._all = [observer(guard, kind, lambda own, kind=kind: kind(own, audited)) for kind in _kinds()]

    def start(self) -> None:
        """The run begins."""
        for one in self._all:
            let(self._guard, one.start)

    def begin(self) -> None:
        """An audited step begins."""
        for one in self._all:
            let(self._guard, one.begin)

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """The gradients of these parameters are whole and not yet clipped."""
        for one in self._all:
            let(self._guard, one.unclipped, parameters)

    def steps(self, optimizer: Any) -> None:
        """This optimizer is about to step, whoever keeps the gradients."""
        for one in self._all:
            let(self._guard, one.steps, optimizer)

    def stepped(self) -> None:
        """It has stepped."""
        for one in self._all:
            let(self._guard, one.stepped)

    def before_update(self, tape: Tape) -> None:
        """An optimizer is about to step."""
        for one in self._all:
            let(self._guard, one.before_update, tape)

    def end(self) -> None:
        """The step has ended."""
        for one in self._all:
            undo(self._guard, one.end)

    def facts(self) -> dict[str, Any]:
        """Return the fields of `StepFacts` that the observers saw; those of one that has failed are left out."""
        return {name: fact for one in self._all for name, fact in (let(self._guard, one.facts) or {}).items()}

    def stop(self) -> None:
        """The run has ended."""
        for one in self._all:
            undo(self._guard, one.stop)


@cache
def _kinds() -> tuple[type[Observer], ...]:
    """Return the observers of this folder, by the names of their files."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in files]
    return tuple(
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Observer) and kind.__module__ == module.__name__
    )


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
