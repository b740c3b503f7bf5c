"""Writers: each file here is one sink, named for its file, and found by that name in a plan."""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """What the writer hands steps to. All but `takes` run on the writer's thread, never inside a step's hooks.

    A module in this folder holds `def open(folder: pathlib.Path, plan: Plan, place: Place) -> Sink`; the sink is named for its
    file. `close` is asked of every sink. A sink has those of the others that it does something at:

        write(step_data)       write one collected step of one rank, atomically: readers see the whole step or nothing
        takes(step_data)       tell whether a step is to be written; asked when it is handed over, on the training's thread
        flush()                write the steps that were gathered: BATCH_WINDOW after the first of them, at the end, and once
                               before the first step; a sink that raises keeps them for the next time
        tensor(step, saved)    store one value, a `SavedTensor`, before the data of its step; return whether more may follow
                               (False: the size budget is reached)
        chunk(step, chunk)     store many values at once, as `SavedTensor.all_of` takes them, in the place of `tensor`
        findings(findings)     write findings as they are made
        counts(findings)       write findings again that were written before and have been seen at more steps since
        warnings_made()        return the findings on the sink's own work since the last call (a budget was reached)
    """

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        ...
