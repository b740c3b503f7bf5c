"""The numbers of a step that will never end: harvested from another thread, while the process is about to die."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.records import Place, Reel
from trainprobe.engine.reel import slots
from trainprobe.engine.tape import Tape

TOO_LATE = "it was being looked at when the process was ended"


def harvest_unfinished(tape: Tape, step: int, place: Place, **about: Any) -> Reel:
    """Return the reel of what a step has brought so far. Whoever still records goes on; what that brings is left out.

    Values on a device are waited for.
    """
    noted = tape._noted = tape._all_noted()
    tape.eye = tape._arena = None  # they stay as they are for those who are using them
    calls = list(tape.calls)
    reel = tape.harvest(step, place, complete=False, **about)
    reel.calls = calls
    known = {id(value) for value in reel.values if value.row < len(reel.partials)}
    known |= {id(twin) for twin, value in noted if id(value) in known}
    for call in calls:
        for _, value in slots(call):
            if id(value) not in known:
                value.row, value.note = -1, TOO_LATE
    return reel
