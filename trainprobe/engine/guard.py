"""The one place where a fault of the tool is caught, so that it never becomes a fault of the training.

The first fault disables the tool, loudly, and the training goes on with correct results. Under test (a plan's
`on_error: raise`) it is raised instead.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from trainprobe.engine.records import Finding
from trainprobe.errors import ProbeError, StopTraining


class Guard:
    """Runs the tool's own code; after the first fault every further call is a no-op."""

    def __init__(self, on_error: str = "continue", tell: Callable[[Finding], None] | None = None) -> None:
        self.raising = on_error == "raise"
        self.tripped: Finding | None = None
        self._tell = tell
        self._on_trip: list[Callable[[], None]] = []

    def on_trip(self, release: Callable[[], None]) -> None:
        """Register what must be undone at once when the tool is disabled (remove hooks and patches)."""
        self._on_trip.append(release)

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `call` unless the tool is disabled; return its result, or None after a fault."""
        if self.tripped is not None:
            return None
        try:
            return call(*args, **kwargs)
        except StopTraining:
            raise
        except Exception as fault:  # noqa: BLE001  (the one place: a fault of the tool is never the training's fault)
            self.trip(fault)
            return None

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
        where = traceback.extract_tb(fault.__traceback__)
        place = f"{where[-1].filename}:{where[-1].lineno}" if where else "unknown place"
        kind = "" if isinstance(fault, ProbeError) else f"{type(fault).__name__}: "
        self.tripped = Finding(
            rule="guard",
            severity="error",
            message=f"trainprobe disabled itself, the training goes on unobserved: {kind}{fault} (at {place})",
        )
        sys.stderr.write(f"trainprobe: {self.tripped.message}\n")
        for release in self._on_trip:
            release()
        if self._tell is not None:
            self._tell(self.tripped)
