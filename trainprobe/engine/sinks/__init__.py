"""Writers: each file here is one sink, named for its file, and found by that name in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainprobe.engine.records import Finding, Reel


class Sink(Protocol):
    """What a writer offers. All three are called on the writer thread, never inside a training step's hooks.

    A module in this folder holds `def open(folder: pathlib.Path, plan: Plan, place: Place) -> Sink`; the sink is named for its
    file. What a sink may offer besides (tensor values, complaints) is in engine.writer.
    """

    def write(self, reel: Reel) -> None:
        """Write one collected step of one rank, atomically: readers see the whole step or nothing."""
        ...

    def findings(self, findings: Sequence[Finding]) -> None:
        """Write findings as they are made; a sink that has no place for them does nothing."""
        ...

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        ...
