"""What of a recorded run there was to look at: steps of each rank, ranks that are not there, steps that were recorded twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainprobe.engine.core.words import briefly, counted
from trainprobe.engine.storage.dumps.layout import LIVE_FILE, files_of_run
from trainprobe.engine.storage.step_counts import read_counts, shortfall
from trainprobe.monitor.fleet.words import ranks_in_words
from trainprobe.monitor.frames import Frame

# rules that judge tensors and nothing else
OF_TENSORS = ("dead", "flow", "frozen", "update_ratio")
_SCALARS = f"Scalars alone were recorded: the rules {', '.join(OF_TENSORS)}, which look at tensors, had nothing to judge"
_OPEN = "The run goes on, or it was killed: its last second is not in the log (`trainprobe black-box` reads what a kill left)"


class LookedAt:
    """Counts frames as they pass. folder: of a run that is over, or is taken to be."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._steps: dict[int, set[int]] = {}
        self._frames: Counter[int] = Counter()
        self.values = 0  # that came by
        self._scalars = 0  # of them
        self._again: dict[int, set[int]] = {}  # rank → steps that came once more
        self._world_size = 1
        self._cut: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, frame: Frame) -> None:
        """Count a frame."""
        self._frames[frame.place.rank] += 1
        self.values += frame.health.size
        self._scalars += len(frame.scalars)
        seen = self._steps.setdefault(frame.place.rank, set())
        if frame.step in seen:
            self._again.setdefault(frame.place.rank, set()).add(frame.step)
        seen.add(frame.step)
        if not frame.complete:
            self._cut.add(frame.step)
        self._world_size = max(self._world_size, frame.place.world_size)

    def passing(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Count frames and pass them on."""
        for frame in frames:
            self.add(frame)
            yield frame

    def shortfall(self, folder: Path) -> str:
        """Return "4 of 300 steps recorded" where the run in a folder had more steps than came by, else an empty text."""
        return shortfall(folder, self._frames)

    def amount(self) -> str:
        """Return "40 steps of 2 ranks"."""
        most = max(map(len, self._steps.values()), default=0)
        return f"{counted(most, 'step')} of {counted(len(self._steps), 'rank')}"

    def lacking(self) -> list[str]:
        """Return sentences on ranks without steps, with fewer steps than others, and on steps that an error cut short or that
        were recorded twice.
        """
        numbers = {rank: len(steps) for rank, steps in self._steps.items()}
        most = max(numbers.values(), default=0)
        absent = [rank for rank in range(self._world_size) if rank not in numbers] if numbers else []
        fewer = {rank: n for rank, n in numbers.items() if n < most}
        least = f"{'' if len(set(fewer.values())) == 1 else 'down to '}{min(fewer.values(), default=0)}"
        again = set[int]().union(*self._again.values())
        return [
            *([_SCALARS] if 0 < self.values == self._scalars else []),
            *([f"Of {ranks_in_words(absent, {})} nothing is there"] if absent else []),
            *([f"{ranks_in_words(fewer, {}).capitalize()} had fewer steps: {least}"] if fewer else []),
            *([_OPEN] if self._folder is not None and any(map(_is_open, files_of_run(self._folder, LIVE_FILE))) else []),
            *([f"{briefly('step', self._cut).capitalize()} {_was(self._cut)} cut short by an error"] if self._cut else []),
            *([f"The run went back: {briefly('step', again)} {_was(again)} recorded more than once"] if again else []),
        ]


def _is_open(stream: Path) -> bool:
    """Tell whether a stream is of a run that did not come to its end; one that did may have had no room for a segment."""
    counts = read_counts(stream.parent)
    return counts is None or not counts.ended


def _was(steps: set[int]) -> str:
    return "was" if len(steps) == 1 else "were"
