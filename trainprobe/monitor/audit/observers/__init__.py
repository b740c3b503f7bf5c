"""The observers of the audit: each looks at one thing of a step, and where it fails, the audit goes on without it.

Each file here holds one subclass of `Observer`, and is found by being here; relations name the file in their `OBSERVERS`. A new
fact of a step needs the observer that sees it and the relation that judges it: see `monitor.audit.facts`. The fact of an
observer that was left out has its defaults; a fault of one that is `essential` has the whole audit left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from trainprobe.engine.capture.parameter_states import ParameterStateTap
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard, PartGuard
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.facts.updates import Progress

if TYPE_CHECKING:
    from trainprobe.monitor.audit.program import AuditProgram

T = TypeVar("T")
O = TypeVar("O", bound="Observer")  # noqa: E741
_RELEASES = ("end", "stop")  # methods by which an observer takes away what it has installed


class Audited:
    """What an observer may ask of the training that is audited.

    states: the tap of parameters. names: returns id of parameter → recorded name. run: answers about the run; it is set before
    the run begins. loss: the loss of the step as the user declares it, a function of the model. models: the chunks of the
    model. optimizers: those that are known so far. tape: of the step that is audited, None between steps. asleep: the audit
    itself runs the model. modes: module → whether it was in training mode as the first backward pass of this step began.
    progress: returns how far a trainer is that reports it. pause_others: is called when the audit begins and ends to run the
    model. observers: all of them.
    """

    run: AuditProgram
    observers: Observers

    def __init__(self, states: ParameterStateTap, names: Callable[[], dict[int, str]]) -> None:
        self.states = states
        self.names = names
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.tape: Tape | None = None
        self.loss: Callable[[Any], Any] | None = None
        self.asleep = False
        self.modes: Mapping[str, bool] | None = None
        self.progress: Callable[[], Progress] = Progress
        self.pause_others: Callable[[bool], None] = lambda begins: None

    @property
    def plain(self) -> bool:
        """Whether gradients are those of the parameters: no framework keeps them elsewhere."""
        return self.states.source is None

    @property
    def fingerprints(self) -> bool:
        """Whether parameters, gradients and states of this step are fingerprinted."""
        return self.observers.awaits or self.run.wants("fingerprints")

    def of(self, kind: type[O]) -> O:
        """Return an observer that the caller has among its `needs`."""
        return self.observers.of(kind)

    def notify(self, event: str, *args: Any) -> None:
        """Call the method of that name of every observer that has one."""
        self.observers.notify(event, *args)


class Observer:
    """See the module text. Every event does nothing unless an observer defines it.

    guard: the observer's own. needs: observers that it asks, and that hear of each event before it. essential: nothing can be
    judged without it. only_when_due: it hears of steps at which a relation that names it is checked, and of no others. awaits:
    it has to see the next step, whether a relation is checked there or not.
    """

    needs: ClassVar[tuple[type[Observer], ...]] = ()
    essential: ClassVar[bool] = False
    only_when_due: ClassVar[bool] = False
    awaits: bool = False

    def __init__(self, guard: Guard, audited: Audited) -> None:
        self._guard = guard
        self._audited = audited
        self.forget()

    def forget(self) -> None:
        """Set what was seen of a step to nothing: the observer is made, or an audited step is about to begin."""

    def start(self) -> None:
        """The run begins, or goes on with another model."""

    def begin(self) -> None:
        """An audited step begins."""

    def first_forward(self) -> None:
        """The first forward of the step is about to begin."""

    def model_called(self, model: Any, named: Mapping[str, Any]) -> None:
        """The model, without its wrappers, is called in training. named: its arguments."""

    def module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A module of the model is called in training."""

    def module_returned(self, module: Any, result: Any) -> None:
        """A module of the model has returned."""

    def other_called(self, module: Any) -> None:
        """A module that is in evaluation mode, and not the model, is called."""

    def first_backward(self) -> None:
        """The first backward pass of the step is about to begin."""

    def backward_begins(self, root: Any) -> None:
        """A backward pass is about to begin. root: the number that it begins from, None where it begins from more."""

    def backward_ends(self) -> None:
        """The pass is over."""

    def cleared(self, owner: Any) -> None:
        """The gradients of an optimizer or a module are about to be cleared, after the first backward pass."""

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """The gradients of these parameters are whole and not yet clipped."""

    def before_update(self, tape: Tape, optimizer: Any) -> None:
        """This optimizer is about to step; the gradients are those of the parameters, in full."""

    def steps(self, optimizer: Any) -> None:
        """This optimizer is about to step, whoever keeps the gradients."""

    def stepped(self) -> None:
        """It has stepped."""

    def others_updated(self) -> None:
        """Behind a backward pass, a loop has updated another model."""

    def was_of_others(self) -> None:
        """Another loss has come since: what was seen up to that update was for the other model."""

    def end(self) -> None:
        """The step has ended: take away what `begin` installed. Called also where the observer has failed."""

    def facts(self, step_data: StepData) -> Any:
        """Return the observer's fact, a frozen dataclass, once the step has crossed to the host. Annotated with its class."""

    def late(self) -> Any:
        """Return the fact of what came after the last audited step; None where nothing did."""

    def stop(self) -> None:
        """The run has ended: take away what `start` installed. Called also where the observer has failed."""


class Replacing(Observer):
    """An observer that has functions of a library replaced for a while."""

    _places: Sequence[Replaced] = ()

    @property
    def replaces(self) -> bool:
        """Whether they are replaced now."""
        return bool(self._places)

    def replaced(self) -> Iterable[Replaced]:
        """Replace the functions, one after the other."""
        return ()

    def replace_all(self) -> None:
        """Replace them, unless they are."""
        if not self._places:
            self._places = places = list[Replaced]()
            places.extend(self.replaced())  # each is kept as soon as it is made

    def put_back(self) -> None:
        """Put back what was there."""
        for place in self._places:
            place.back()
        self._places = ()


class StepReplacing(Replacing):
    """One that does so while a step is audited."""

    def begin(self) -> None:
        """Replace the functions."""
        self.replace_all()

    def end(self) -> None:
        """Put them back."""
        self.put_back()


class RunReplacing(Replacing):
    """One that does so from the start of the run to its end."""

    def start(self) -> None:
        """Replace the functions."""
        self.replace_all()

    def stop(self) -> None:
        """Put them back."""
        self.put_back()


Heard = tuple[PartGuard | None, Callable[..., Any]]  # the guard of an observer, None for an essential one, and its method


class Observers:
    """The observers that the relations of a plan name, and those that these need."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        self._guard = guard
        self._audited = audited
        self._all: dict[type[Observer], Observer] = {}
        self._tables: dict[frozenset[type[Observer]], dict[str, list[Heard]]] = {}
        self._heard: dict[str, list[Heard]] = {}  # event → who hears of it in this step
        audited.observers = self

    def of(self, kind: type[O]) -> O:
        """Return the observer of a class."""
        return self._all[kind]  # pyright: ignore[reportReturnType]

    @property
    def awaits(self) -> bool:
        """Whether one of them has to see the next step."""
        return any(one.awaits for one in self._all.values())

    def start(self, names: Collection[str] | None) -> None:
        """The run begins, or goes on with another model. names: of the observers to have; None: all."""
        self._add(names)
        self._heard = self._table(self._all.values())
        self.notify("start")

    def begin(self, names: Collection[str] | None, due: Collection[str] | None) -> None:
        """An audited step begins. names: as for `start`, as a plan may have changed. due: those of the relations due now."""
        fresh = self._add(names)
        self._heard = self._table(fresh)
        self.notify("start")
        needed = _closure(due)
        self._heard = self._table(one for kind, one in self._all.items() if not kind.only_when_due or kind in needed)
        self.notify("forget")
        self.notify("begin")

    def notify(self, event: str, *args: Any) -> None:
        """Notify all observers that define an event, those that others need first."""
        for own, method in self._heard.get(event, ()):
            if own is None:
                method(*args)
            else:
                own.within(method, *args)

    def hears(self, event: str) -> bool:
        """Tell whether anyone hears of an event in this step."""
        return bool(self._heard.get(event))

    def end(self) -> None:
        """The step has ended."""
        self._undo("end")

    def facts(self, step_data: StepData) -> list[Any]:
        """Return the facts that were seen; those of an observer that has failed are left out."""
        return self._gather("facts", step_data)

    def late(self) -> list[Any]:
        """Return the facts of what came after the last audited step."""
        return self._gather("late")

    def _gather(self, event: str, *args: Any) -> list[Any]:
        called = (method(*args) if own is None else own.within(method, *args) for own, method in self._heard.get(event, ()))
        return [fact for fact in called if fact is not None]

    def stop(self) -> None:
        """The run has ended."""
        self._undo("stop")

    def _undo(self, event: str) -> None:
        for kind, one in self._all.items():
            method = getattr(one, event)
            if kind.essential:
                method()
            else:
                undo(self._guard, method)

    def _add(self, names: Collection[str] | None) -> list[Observer]:
        fresh: list[Observer] = []
        for kind in _closure(names):
            if kind not in self._all:
                self._all[kind] = self._made(kind)
                fresh.append(self._all[kind])
        return fresh

    def _made(self, kind: type[Observer]) -> Observer:
        if kind.essential:
            return kind(self._guard, self._audited)
        own = self._guard.of(part_of_observer(kind))
        made = kind(own, self._audited)
        for name in _RELEASES:
            own.on_trip(getattr(made, name))
        return made

    def _table(self, those: Collection[Observer] | Any) -> dict[str, list[Heard]]:
        kinds = frozenset(map(type, those := tuple(those)))
        if kinds not in self._tables:
            table: dict[str, list[Heard]] = {}
            for one in those:
                own = None if one.essential else self._guard.of(part_of_observer(type(one)))
                for event in _EVENTS:
                    if getattr(type(one), event) is not getattr(Observer, event):
                        table.setdefault(event, []).append((own, getattr(one, event)))
            self._tables[kinds] = table
        return self._tables[kinds]


_EVENTS = tuple(name for name, it in vars(Observer).items() if callable(it) and not name.startswith("_"))


@cache
def _kinds() -> Mapping[str, type[Observer]]:
    """Return name of each file of this folder → its observer."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    return {name: _kind_in(importlib.import_module(f"{__name__}.{name}")) for name in files}


def _kind_in(module: Any) -> type[Observer]:
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Observer))
    return next(kind for kind in kinds if kind.__module__ == module.__name__)


def _closure(names: Collection[str] | None) -> tuple[type[Observer], ...]:
    """Return the observers of these names and those that they need, each behind those that it needs itself. None: all."""
    return _in_order(frozenset(_kinds() if names is None else names))


@cache
def _in_order(names: frozenset[str]) -> tuple[type[Observer], ...]:
    found: dict[type[Observer], None] = {}

    def add(kind: type[Observer]) -> None:
        for needed in kind.needs:
            add(needed)
        found[kind] = None

    for name, kind in _kinds().items():
        if name in names:
            add(kind)
    return tuple(found)


def let(guard: Guard, call: Callable[..., T], *args: Any) -> T | None:
    """Call a method of an observer; return None where the observer has failed, now or before."""
    return guard.part(_part(call), call, *args)


def left_out(_: Exception) -> None:
    """Leave out what cannot be looked at: a nested or sparse tensor, or one of the program's own class."""


def undo(guard: Guard, call: Callable[..., Any]) -> None:
    """Call a method that takes away what an observer has installed, also where the observer has failed."""
    guard.of(_part(call)).undo(call)


def part_of_observer(kind: type) -> str:
    """Return the name that a class of observers has as a part of the tool (see `engine.core.guard.Guard.of`)."""
    return f"the audit's {kind.__name__}"


def _part(call: Callable[..., Any]) -> str:
    return part_of_observer(type(getattr(call, "__self__", None)))
