"""The one place where a fault of the tool is caught, so that it never becomes a fault of the training.

A fault disables the tool, loudly, and the training goes on with correct results. Under test (a plan's `on_error: raise`) it
is raised instead. A tap, an observer, a rule or another part that the rest does without has a guard of its own (`Guard.of`),
and its fault disables that part alone. What only one value of the program causes costs no more than that value: see `attempt`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.records import Finding
from trainprobe.engine.unobserved import lacks_descriptors
from trainprobe.errors import ProbeError, StopTraining

T = TypeVar("T")
_PACKAGE = f"{Path(__file__).resolve().parents[2]}/"
_LONGEST = 300  # characters of an exception's own text


class Guard:
    """Runs the tool's own code; after the first fault every further call is a no-op.

    without_dispatch: returns the context in which the tool's code runs; the program's modes do not see what it computes.
    """

    def __init__(
        self,
        on_error: str = "continue",
        report: Callable[[Finding], None] | None = None,
        without_dispatch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.raising = on_error == "raise"
        self.tripped: Finding | None = None
        self.farewell = "trainprobe disabled itself, the training goes on unobserved"
        self._on_finding = report
        self._without_dispatch = without_dispatch
        self._on_trip: list[Callable[[], None]] = []
        self.parts: dict[str, PartGuard] = {}

    def on_trip(self, release: Callable[[], None]) -> None:
        """Register what must be undone at once when the tool is disabled (remove hooks and patches), the last one first."""
        self._on_trip.append(release)

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `call` unless the tool is disabled; return its result, or None after a fault."""
        if self.tripped is not None:
            return None
        try:
            with self._without_dispatch():  # in this frame: call stacks leave out as many frames of the tool as there are here
                return call(*args, **kwargs)
        except StopTraining:
            raise
        except Exception as fault:  # noqa: BLE001  (the one place: a fault of the tool is never the training's fault)
            self.trip(fault)
            return None

    def within(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what `run` does, for code that stands within `run` already."""
        if self.tripped is not None:
            return None
        try:
            return call(*args, **kwargs)
        except StopTraining:
            raise
        except Exception as fault:  # noqa: BLE001  (as above)
            self.trip(fault)
            return None

    def of(self, name: str) -> PartGuard:
        """Return the guard of a part of the tool that the rest does without, such as "the rule spike"; one for each name."""
        if name not in self.parts:
            self.parts[name] = PartGuard(self, name)
        return self.parts[name]

    def part(self, name: str, call: Callable[..., T], *args: Any) -> T | None:
        """Run a part of the tool within `run`; return its result, or None where the part has failed, now or before."""
        return self.of(name).within(call, *args)

    def leaves_out(self, name: str) -> bool:
        """Return whether a part has failed."""
        return name in self.parts and self.parts[name].tripped is not None

    def undo(self, call: Callable[..., Any], *args: Any) -> None:
        """Run what takes away something that is installed, within `run`: also once the tool or the part is disabled."""
        attempt(call, *args, otherwise=self.trip)

    def keep_on(self, call: Callable[..., Any], *args: Any) -> None:
        """Run `call` also once the tool is disabled: what other ranks wait for. A later fault changes nothing more."""
        with self._without_dispatch():
            self.undo(call, *args)

    def set_up(self, call: Callable[..., Any], *args: Any) -> None:
        """Do what `run` does before the training starts: an error that the user has to mend (a ProbeError) is raised."""
        refused: list[ProbeError] = []

        def unless_refused() -> None:
            try:
                call(*args)
            except ProbeError as error:
                if lacks_descriptors(error):
                    raise  # nothing that can be mended in the program
                refused.append(error)

        self.run(unless_refused)
        if refused:
            raise refused[0]

    def take(self, fault: BaseException) -> None:
        """Do what `run` does with a fault; for code that cannot be called through it."""
        if isinstance(fault, StopTraining) or not isinstance(fault, Exception):
            raise fault
        self.trip(fault)

    def trip(self, fault: BaseException) -> None:
        """Disable the tool because of `fault`, say so once, and undo what is installed."""
        if self.raising:
            raise fault
        if self.tripped is not None:
            return
        what = _own_text(fault) if isinstance(fault, ProbeError) else fault_text(fault)
        self.tripped = Finding(
            rule="guard",
            severity="error",
            message=f"{self.farewell}: {what} (at {_place_of(fault)})",
        )
        say(self.tripped.message, severity="error", finding=self.tripped)
        for part in self.parts.values():
            part.tripped = part.tripped or self.tripped
        self._take_away()
        self._report(self.tripped)

    def _take_away(self) -> None:
        """Undo what is installed: what was put in last stands above the rest."""
        releases = [*reversed(self._on_trip), *(release for part in self.parts.values() for release in reversed(part._on_trip))]
        left = attempt(all_of, releases, otherwise=fault_text)
        if left is not None:
            say(f"something may still be installed: {left}", severity="error")

    def _report(self, finding: Finding) -> None:
        if self._on_finding is not None:
            attempt(self._on_finding, finding, otherwise=fault_text)


class PartGuard(Guard):
    """The guard of one part of the tool. Its first fault disables that part, which one finding reports, and nothing else.

    whole: the guard of the tool; once that has tripped, this one has too. name: of the part, as the finding has it.
    """

    def __init__(self, whole: Guard, name: str) -> None:
        super().__init__(without_dispatch=whole._without_dispatch)
        self.raising = whole.raising
        self.tripped = whole.tripped
        self._whole = whole
        self._name = name
        self._dependents: list[PartGuard] = []

    def of(self, name: str) -> PartGuard:
        """Return the guard of another part of the same tool."""
        return self._whole.of(name)

    def leaves_out(self, name: str) -> bool:
        """Return whether another part of the same tool has failed."""
        return self._whole.leaves_out(name)

    def is_needed_by(self, name: str) -> None:
        """Remember that another part cannot do without this one: it is left out with it."""
        self._dependents.append(self.of(name))

    def trip(self, fault: BaseException) -> None:
        """Leave the part out because of `fault`, say so once, and undo what it has installed."""
        if self.raising:
            raise fault
        if self.tripped is not None:
            return
        parts = self._with_those_that_need_it()
        needing = f", with {' and '.join(part._name for part in parts[1:])}, which need it" if parts[1:] else ""
        message = f"{self._name} failed and is left out from here on{needing}, everything else goes on: {fault_text(fault)}"
        finding = Finding("probe", "warning", f"{message} (at {_place_of(fault)})")
        for part in parts:
            part.tripped = finding
            part._take_away()
        self._whole._report(finding)

    def _with_those_that_need_it(self) -> list[PartGuard]:
        """Return this part and the parts that still run and cannot do without it."""
        found: list[PartGuard] = [self]
        for part in found:
            found += [other for other in part._dependents if other.tripped is None and other not in found]
        return found


Part = Callable[..., Any]  # (name, call, *args) → the result of the call, or None where the part is left out


def simply(name: str, call: Callable[..., T], *args: Any) -> T:
    """Run a part of the tool where no training is to be kept from its faults."""
    return call(*args)


def attempt(call: Callable[..., T], *args: Any, otherwise: Callable[[Exception], T | Any]) -> T | Any:
    """Return `call(*args)`, or `otherwise(fault)` where it fails: for what an unusual value of the program may break."""
    try:
        return call(*args)
    except StopTraining:
        raise
    except Exception as fault:  # noqa: BLE001  (the value may be of any class, whose code may raise anything)
        return otherwise(fault)


def all_of(calls: Iterable[Callable[[], Any]]) -> None:
    """Make every call, also those behind one that fails; then raise the first fault."""
    faults: list[Exception] = []
    for call in calls:
        attempt(call, otherwise=faults.append)
    if faults:
        raise faults[0]


def fault_text(fault: BaseException) -> str:
    """Return the kind of a fault and what it says, in one line."""
    return f"{type(fault).__name__}: {_own_text(fault)}"


def _own_text(fault: BaseException) -> str:
    text = attempt(str, fault, otherwise=lambda _: "it cannot be printed")
    line = " ".join(text.encode(errors="backslashreplace").decode().split())
    return line if len(line) <= _LONGEST or isinstance(fault, ProbeError) else f"{line[:_LONGEST]}…"


def _place_of(fault: BaseException) -> str:
    """Return the innermost place in this package that a fault passed; a place elsewhere where it passed none."""
    where = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)]
    own = [place for place in where if place[0].startswith(_PACKAGE) and place[0] != __file__]
    return "{}:{}".format(*(own or where)[-1]) if where else "unknown place"
