"""The taps of one run: a program asks for those that it wants, and a tap that several ask for is there once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainprobe.engine.capture import ModelTap, StatesTap, Tap, part_of
from trainprobe.engine.capture.pauses import Pauses
from trainprobe.engine.capture.requests import NO_MODULES, FeatureRequest, ModuleRequest, OpRequest, StatesRequest
from trainprobe.engine.core.guard import Guard, PartGuard
from trainprobe.engine.core.position import Position
from trainprobe.engine.core.sources import Source
from trainprobe.engine.plan.detail import Detail

T = TypeVar("T")


class Taps(ABC):
    """The taps of one run under one framework.

    A method makes its tap when it is first asked for, and then returns the same one, unless a run changes what it is asked for.
    It returns None where the framework has no such tap. `get` returns a tap only where some program has asked for it.

    fullest: the level that records the most. needed: classes of taps, each with the part of the tool that would say what is
    not true without it. cuts: parts of a tensor that are stored, as flags number them. records_update: operators of the update
    are recorded too. dumps_when_asked: the plan's level is off, and a program may ask for a dump; None: not known yet.
    position: told where the training is. forward_at: steps whose forward pass the monitor looks at because a rule asked for it.
    """

    fullest = "mix"
    needed: Sequence[tuple[type, str]] = ()

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.pauses = Pauses()
        self.cuts: list[Detail] = []
        self.records_update = False
        self.dumps_when_asked: bool | None = None
        self.position: Position | None = None
        self.forward_at = set[int]()
        self._made: dict[str, tuple[object, Any]] = {}  # role → what it was made for, tap
        self._earlier: dict[str, tuple[object, Any]] = {}
        for kind, needed_by in self.needed:
            self.own(kind).is_needed_by(needed_by)

    # ---- what is there -------------------------------------------------------------------------------------------

    def get(self, role: str, kind: type[T]) -> T | None:
        """Return the tap that the method `role` made; None where none is there, or one of another class."""
        tap = self._made.get(role, (None, None))[1]
        return tap if isinstance(tap, kind) else None

    @property
    def naming(self) -> ModelTap:
        """What knows the names of the model: a tap of its modules, or one that records nothing."""
        found = self.get("modules", ModelTap) or self.get("watched", ModelTap)
        return self.once("naming", lambda: found or self._of_modules(NO_MODULES, stacks=False))

    def once(self, role: str, make: Callable[[], T], wanted: object = None) -> T:
        """Return the tap of a role, made anew where it was made for something else that is wanted."""
        known = self._made.get(role) or self._earlier.get(role)
        known = known if known is not None and known[0] == wanted else (wanted, make())
        self._made[role] = known
        return known[1]

    def ask_anew(self) -> None:
        """Have all programs ask again: a tap that none asks for any more is gone."""
        self._earlier, self._made = self._made, {}

    def own(self, kind: type) -> PartGuard:
        """Return the guard that taps of a class have of their own."""
        return self.guard.of(part_of(kind))

    def let(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a method of a tap, whose fault costs that tap alone. For code that runs within `Guard.run`."""
        return self.guard.part(part_of(type(getattr(call, "__self__", None))), call, *args)

    def follow(self, position: Position | None) -> None:
        """Have `position` told where the training is, as far as the taps that run see it."""
        self.position = position
        for role in ("modules", "watched", "batches") if position is not None else ():
            tap: Any = self.get(role, Tap)
            if tap is not None:
                tap.position = position

    def notes(self) -> list[str]:
        """Return what could not be seen, and why."""
        taps = (self.get(role, Tap) for role in ("naming", "modules", "watched", "ops", "exchanged", "features"))
        return list(dict.fromkeys(note for tap in taps if tap is not None for note in getattr(tap, "notes", ())))

    def use_source(self, source: Source) -> Mapping[str, Callable[..., None]]:
        """Take parameters, gradients and optimizer state from `source`; return what is called at which moment of a step."""
        return {}

    # ---- what programs ask for -----------------------------------------------------------------------------------

    def modules(self, request: ModuleRequest) -> ModelTap:
        """Return the dump's tap of modules."""
        return self.once("modules", lambda: self._of_modules(request, stacks=True))

    def watched(self, request: ModuleRequest, stacks: bool, wanted: object) -> ModelTap:
        """Return the monitor's tap of modules. stacks: it keeps call stacks. wanted: the settings that the request is from."""
        return self.once("watched", lambda: self._of_modules(request, stacks), wanted)

    @abstractmethod
    def saved(self, flags: int) -> Tap:
        """Return the tap of values that the program hands over."""

    @abstractmethod
    def ops(self, request: OpRequest) -> Tap:
        """Return the dump's tap of ops."""

    @abstractmethod
    def states(self, request: StatesRequest | None = None) -> StatesTap:
        """Return the tap of parameters, gradients and optimizer state. request: what the monitor wants of it."""

    @abstractmethod
    def audit(self) -> Tap:
        """Return the tap of the audit."""

    @abstractmethod
    def stepping(self) -> Tap:
        """Return the tap that tells when the optimizer runs."""

    @abstractmethod
    def clipping(self) -> Tap:
        """Return the tap that tells when gradients are clipped."""

    @abstractmethod
    def _of_modules(self, request: ModuleRequest, stacks: bool) -> ModelTap:
        """Make a tap of modules."""

    def buffers(self) -> Tap | None:
        """Return the dump's tap of the buffers of modules."""
        return None

    def awaited(self) -> Tap | None:
        """Return the tap of what functional collectives still write."""
        return None

    def collectives(self, flags: int) -> Tap | None:
        """Return the dump's tap of collectives."""
        return None

    def exchanged(self, names: tuple[str, ...]) -> Tap | None:
        """Return the monitor's tap of collectives. names: patterns of those that it looks at."""
        return None

    def scaling(self) -> Tap | None:
        """Return the tap that follows the loss scale."""
        return None

    def unreduced(self, per_micro: bool) -> Tap | None:
        """Return the tap of gradients before they are joined over the ranks."""
        return None

    def batches(self) -> Tap | None:
        """Return the tap of what the model is called with."""
        return None

    def features(self, requests: Sequence[FeatureRequest]) -> Tap | None:
        """Return the tap of deeper features."""
        return None
