"""At which collected steps an optimizer stepped: where none did, there were no gradients to look at."""

from __future__ import annotations

from collections.abc import Iterable

from trainprobe.engine.core.words import briefly
from trainprobe.monitor.frames import Frame, Series
from trainprobe.monitor.scalar_names import scalar


class UpdatesSeen:
    """Follows the steps of one rank. without: steps in which nothing of an update was seen, neither a gradient nor a rate."""

    def __init__(self) -> None:
        self.any = False
        self.modules = False  # whether a step had the result of a module
        self.without: set[int] = set()
        self._last: tuple[object, bool] = (None, False)  # `at` of the last frame, and whether it has anything of an update

    def add(self, frame: Frame) -> None:
        """Look at a step; one that an error cut short has no update."""
        if self._last[0] is not frame.at:
            series = [frame.table.series[i] for i in frame.at.tolist()]
            self._last = frame.at, any(map(_of_update, series))
            self.modules = self.modules or any(s.address.kind == "module" for s in series)
        if self._last[1] or scalar(frame.scalars, "learning rate") is not None:
            self.any = True
            self.without.discard(frame.step)
        elif frame.complete:
            self.without.add(frame.step)


def _of_update(series: Series) -> bool:
    address = series.address
    return address.kind == "parameter" and (address.slot.startswith("grad") or address.slot.endswith("_after"))


def no_update(ranks: Iterable[UpdatesSeen]) -> str:
    """Return a sentence where modules ran and no rank saw an update in any step; else ""."""
    seen = list(ranks)
    if any(rank.any for rank in seen) or not any(rank.modules and rank.without for rank in seen):
        return ""
    return "No update was recorded: gradients of parameters and new weights are not looked at."


def steps_without_update(ranks: Iterable[UpdatesSeen]) -> str:
    """Return a sentence on the steps in which a rank that takes part in updates saw none; "" where there are none."""
    steps = set[int]().union(*(rank.without for rank in ranks if rank.any))
    if not steps:
        return ""
    return (
        f"In {briefly('step', steps)} no optimizer stepped, as when a gradient scaler skips one: "
        "gradients of such a step are not looked at."
    )
