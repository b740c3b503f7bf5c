"""The one place where a fault of the tool is caught, so that it never becomes a fault of the training.

The first fault disables the tool, loudly, and the training goes on with correct results. Under test (a plan's
`on_error: raise`) it is raised instead. A rule, a relation or another part that the rest does without costs no more than
itself: see `Guard.part`. What only one value of the program causes costs no more than that value: see `attempt`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from trainprobe.engine.records import Finding
from trainprobe.errors import ProbeError, StopTraining

T = TypeVar("T")
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_LONGEST = 300  # characters of an exception's own text


class Guard:
    """Runs the tool's own code; after the first fault every further call is a no-op.

    apart: returns a context in which the program's modes do not see what the tool computes; the tool's code runs inside it.
    """

    def __init__(
        self,
        on_error: str = "continue",
        tell: Callable[[Finding], None] | None = None,
        apart: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.raising = on_error == "raise"
        self.tripped: Finding | None = None
        self._tell = tell
        self._apart = apart
        self._on_trip: list[Callable[[], None]] = []
        self._left_out: set[str] = set()

    def on_trip(self, release: Callable[[], None]) -> None:
        """Register what must be undone at once when the tool is disabled (remove hooks and patches), the last one first."""
        self._on_trip.append(release)

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `call` unless the tool is disabled; return its result, or None after a fault."""
        if self.tripped is not None:
            return None
        try:
            with self._apart():
                return call(*args, **kwargs)
        except StopTraining:
            raise
        except Exception as fault:  # noqa: BLE001  (the one place: a fault of the tool is never the training's fault)
            self.trip(fault)
            return None

    def part(self, name: str, call: Callable[..., T], *args: Any) -> T | None:
        """Run a part of the tool that the rest does without, such as "the rule spike"; return its result, or None.

        After a fault it is left out for good, which one finding says. For code that runs within `run`.
        """
        if name in self._left_out:
            return None
        try:
            return call(*args)
        except StopTraining:
            raise
        except Exception as fault:
            if self.raising:
                raise
            self._left_out.add(name)
            message = f"{name} failed and is left out from here on, everything else goes on: {fault_text(fault)}"
            if self._tell is not None:
                self._tell(Finding("probe", "warning", f"{message} (at {_place_of(fault)})"))
            return None

    def leaves_out(self, name: str) -> bool:
        """Return whether a part has failed."""
        return name in self._left_out

    def keep_on(self, call: Callable[..., Any], *args: Any) -> None:
        """Run `call` also once the tool is disabled: what other ranks wait for. A later fault changes nothing more."""
        with self._apart():
            attempt(call, *args, otherwise=self.trip)

    def set_up(self, call: Callable[..., Any], *args: Any) -> None:
        """Do what `run` does before the training starts: an error that the user has to mend (a ProbeError) is raised."""
        refused: list[ProbeError] = []

        def unless_refused() -> None:
            try:
                call(*args)
            except ProbeError as error:
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
            message=f"trainprobe disabled itself, the training goes on unobserved: {what} (at {_place_of(fault)})",
        )
        sys.stderr.write(f"trainprobe: {self.tripped.message}\n")
        left = attempt(all_of, reversed(self._on_trip), otherwise=fault_text)  # what was put in last stands above the rest
        if left is not None:
            sys.stderr.write(f"trainprobe: something may still be installed: {left}\n")
        if self._tell is not None:
            attempt(self._tell, self.tripped, otherwise=fault_text)


Part = Callable[..., Any]  # (name, call, *args) → the result of the call, or None where the part is left out


def simply(name: str, call: Callable[..., T], *args: Any) -> T:
    """Run a part of the tool where no training is to be kept from its faults."""
    return call(*args)


def attempt(call: Callable[..., T], *args: Any, otherwise: Callable[[Exception], T | Any]) -> T | Any:
    """Return `call(*args)`, or `otherwise(fault)` where it fails: for what an odd value of the program may break."""
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
    said = attempt(str, fault, otherwise=lambda _: "it cannot be printed")
    line = " ".join(said.encode(errors="backslashreplace").decode().split())
    return line if len(line) <= _LONGEST or isinstance(fault, ProbeError) else f"{line[:_LONGEST]}…"


def _place_of(fault: BaseException) -> str:
    """Return the innermost place in this package that a fault passed; a place elsewhere where it passed none."""
    where = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)]
    own = [place for place in where if place[0].startswith(_PACKAGE)]
    return "{}:{}".format(*(own or where)[-1]) if where else "unknown place"
