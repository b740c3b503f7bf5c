"""Writers: each file here is one sink, named for its file, and found by that name in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.storage.dumps.tensor_files import SavedTensor


class Sink(Protocol):
    """What a writer offers. All three are called on the writer thread, never inside a training step's hooks.

    A module in this folder holds `def open(folder: pathlib.Path, plan: Plan, place: Place) -> Sink`; the sink is named for its
    file. The other protocols here are what a sink may offer besides.
    """

    def write(self, step_data: StepData) -> None:
        """Write one collected step of one rank, atomically: readers see the whole step or nothing."""
        ...

    def findings(self, findings: Sequence[Finding]) -> None:
        """Write findings as they are made; a sink that has no place for them does nothing."""
        ...

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        ...


@runtime_checkable
class TensorSink(Protocol):
    """A sink that stores tensor values too, as they come; the data of their step follow them."""

    def tensor(self, step: int, saved: SavedTensor) -> bool:
        """Store one value; return whether more may follow (False: the size budget is reached)."""
        ...


@runtime_checkable
class ChunkSink(Protocol):
    """A tensor sink that takes many values at once."""

    def chunk(self, step: int, chunk: Any) -> bool:
        """Store the values of a chunk (see `SavedTensor.all_of`); return whether more may follow."""
        ...


@runtime_checkable
class BatchSink(Protocol):
    """A sink that gathers steps and writes them together."""

    def flush(self) -> None:
        """Write what was gathered. The writer asks for it BATCH_WINDOW after the first of these steps, and at its end.

        One that raises keeps what it gathered, for the next time. It is also called before the first step.
        """
        ...


@runtime_checkable
class ChoosingSink(Protocol):
    """A sink that leaves some steps out."""

    def takes(self, step_data: StepData) -> bool:
        """Tell whether a step is to be written; asked for when it is handed over, on the training's thread."""
        ...


@runtime_checkable
class WarningSink(Protocol):
    """A sink that warns about its own work, for example that a budget was reached."""

    def warnings_made(self) -> Sequence[Finding]:
        """Return the findings made since the last call."""
        ...


@runtime_checkable
class CountingSink(Protocol):
    """A sink that keeps at how many steps a finding was seen."""

    def counts(self, findings: Sequence[Finding]) -> None:
        """Write findings again that were written before and have been seen at more steps since."""
        ...
