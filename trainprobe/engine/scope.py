"""The stretch of a step between two named calls: the first and the last one that a plan's `scope` wants, both included."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.records import Call
from trainprobe.engine.reel import entry_name


def within(calls: Sequence[Call], first: str, last: str, framework: str = "pytorch") -> tuple[list[Call], str]:
    """Return the calls from the one named `first` up to the one named `last`, in execution order, and what was missing (or "").

    Names are those of a dump, such as `Module.layers.0.Block.forward.0`. Without `last` the stretch ends with the step.
    """
    names = [entry_name(call, framework) for call in calls]
    if first not in names:
        return [], f"scope: {first!r} was not called in this step, so nothing of it is recorded"
    begin = names.index(first)
    try:
        end = names.index(last, begin) + 1
    except ValueError:
        return list(
            calls[begin:]
        ), f"scope: {last!r} was not called after {first!r}: the stretch goes on to the end of the step"
    return list(calls[begin:end]), ""
