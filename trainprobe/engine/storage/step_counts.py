"""How many steps a rank handed to each of its writers, and how many these lost: `rank{R}/steps.json`.

The training counts a step when it hands it over, so that readers know of steps that a kill or a full disk took. The file has
its full size from the start and stays open: it is kept up to date when the disk is full and when no descriptor is left. The
process that writes it holds a lock on it, which tells readers a run that goes on from one that was killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.dumps.layout import LOG_FILE, STEPS_FILE, files_of_run, find_steps, has_run_log
from trainprobe.engine.storage.safe_files import NO_LINK, read_bounded, write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_SIZE = 4096  # bytes
_FORMAT = 1


@dataclass(slots=True)
class Count:
    """Steps of one writer. handed: None where an earlier run in the folder did not count. first, last: of those lost."""

    handed: int | None = 0
    lost: int = 0
    first: int | None = None
    last: int | None = None

    def lose(self, first: int, last: int, steps: int = 1) -> None:
        """Count steps that are lost."""
        self.lost += steps
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)

    def sentence(self) -> str:
        """Return "4 of 300 steps recorded", empty where none was lost."""
        if not self.lost:
            return ""
        return recorded(self.handed - self.lost, self.handed) if self.handed is not None else f"{self.lost} steps not recorded"


def recorded(seen: int, handed: int) -> str:
    """Return "4 of 300 steps recorded"."""
    return f"{seen} of {counted(handed, 'step')} recorded"


class StepCounts:
    """The counts of one rank while it writes. path: of the file, None for counts that are kept in memory alone.

    afresh: the counts of these writers begin at 0; else they go on where the file has them. known: whether nothing is there
    that was not counted.
    """

    def __init__(self, sinks: Iterable[str], path: Path | None = None, *, afresh: bool = True, known: bool = True) -> None:
        earlier = read_counts(path.parent) if path is not None else None
        kept = {name: Count(count.handed, count.lost) for name, count in (earlier.sinks if earlier is not None else {}).items()}
        self.sinks = {**kept, **{name: Count(0 if known else None) for name in sinks if afresh or name not in kept}}
        self.before = {name: (self.sinks[name].handed, self.sinks[name].lost) for name in sinks}
        self._path = path
        self._file: int | None = None
        self._open()

    def _open(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, self._text(False))
            self._file = os.open(self._path, os.O_WRONLY | NO_LINK | getattr(os, "O_BINARY", 0))
            if fcntl is not None:
                attempt(fcntl.flock, self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, otherwise=str)

    def _text(self, ended: bool) -> bytes:
        told = {"format": _FORMAT, "ended": ended, "sinks": self.sinks}
        return orjson.dumps(told).ljust(_SIZE - 1) + b"\n"

    def hand(self, names: Iterable[str]) -> None:
        """Count a step that is handed to these writers."""
        for name in names:
            count = self.sinks[name]
            count.handed = None if count.handed is None else count.handed + 1
        self.keep()

    def keep(self, ended: bool = False) -> None:
        """Write the counts down. Where that fails, the next time may not."""
        if self._file is not None:
            attempt(os.pwrite, self._file, self._text(ended), 0, otherwise=str)

    def look_after(self) -> None:
        """Make the file anew where somebody has removed it."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            os.close(self._file)
            self._file = None
            self._open()

    def end(self) -> None:
        """Say that the run has ended, and let go of the file."""
        self.keep(ended=True)
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def of_this_run(self, name: str) -> Count:
        """Return the count of a writer without what earlier runs in the folder brought."""
        count, (handed, lost) = self.sinks[name], self.before[name]
        since = None if count.handed is None or handed is None else count.handed - handed
        return Count(since, count.lost - lost, count.first, count.last)

    def sentence(self) -> str:
        """Return "4 of 300 steps recorded (the others are lost to dump, jsonl)", empty where this run lost none."""
        counts = {name: count for name in self.before if (count := self.of_this_run(name)).lost}
        if not counts:
            return ""
        return (
            f"{max(counts.values(), key=lambda one: one.lost).sentence()} (the others are lost to {', '.join(sorted(counts))})"
        )


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """What the file of a rank says. ended: whether the run came to its end. alive: whether its process still holds the file."""

    sinks: Mapping[str, Count]
    ended: bool
    alive: bool


def read_counts(folder: Path) -> KeptCounts | None:
    """Return what a rank's folder has of counts, None where it has none that can be read."""
    path = folder / STEPS_FILE
    try:
        told = orjson.loads(read_bounded(path, 2 * _SIZE))
        if told["format"] != _FORMAT:
            return None
        sinks = {str(name): Count(**count) for name, count in told["sinks"].items()}
        whole = all(isinstance(n, int | None) for count in sinks.values() for n in asdict(count).values())
        whole = whole and not any(count.lost is None for count in sinks.values())  # pyright: ignore[reportUnnecessaryComparison]
        return KeptCounts(sinks, bool(told["ended"]), _is_held(path)) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_held(path: Path) -> bool:
    """Tell whether a process has locked a file."""
    if fcntl is None:
        return False
    handle = os.open(path, os.O_RDONLY | NO_LINK)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


_ONLY_LOST = ("dump", "csv")  # readers count what these lost: of a run that went back they hold a step once


def shortfall(folder: Path, seen: Mapping[int, int] = {}, sink: str = "") -> str:
    """Return "4 of 300 steps recorded" where a run had more steps than can be read, empty where it had no more.

    folder: of a run or a rank, or a file in it. seen: rank → steps that its log was read to hold, those that came again too. Of
    several ranks, the one that lacks most is named. A run that goes on may be a moment ahead of its log. sink: whose steps are
    read; by default found out.
    """
    found: list[tuple[int, int, str, int]] = []
    files = sorted(files_of_run(folder, STEPS_FILE)) if folder.is_dir() else [folder.parent / STEPS_FILE]
    by_rank: dict[int, list[tuple[Path, KeptCounts]]] = {}
    for path in files:
        counts = read_counts(path.parent)
        digits = path.parent.name.removeprefix("rank")
        if counts is not None and digits.isdecimal():
            by_rank.setdefault(int(digits), []).append((path.parent, counts))
    for rank, several in by_rank.items():
        read = [(_read_sink(at, counts, sink), counts.alive and not counts.ended) for at, counts in several]
        handed = [count.handed for (_, count), _ in read]
        of = sum(n for n in handed if n is not None)
        missing = sum(count.lost for (_, count), _ in read)
        if None not in handed and not any(alive for _, alive in read) and not any(name in _ONLY_LOST for (name, _), _ in read):
            missing = max(0, of - seen.get(rank, 0))
        if missing:
            said = f"{missing:,} steps not recorded" if None in handed else recorded(max(0, of - missing), of)
            found.append((missing, -rank, said, rank))
    if not found:
        return ""
    _, _, said, rank = max(found)
    more = f", and {counted(len(found) - 1, 'other rank')} lacks some too" if len(found) > 1 else ""
    return said + (f" of rank {rank}{more}" if len(by_rank) > 1 else "")


def _read_sink(folder: Path, counts: KeptCounts, sink: str) -> tuple[str, Count]:
    """Return the writer of a rank whose steps are read back: one that left something, and a log before a dump."""
    there = {"parquet": has_run_log(folder), "jsonl": (folder / LOG_FILE).is_file(), "dump": bool(find_steps(folder.parent))}
    names = [name for name in ("parquet", "jsonl", "dump", "csv") if name in counts.sinks]
    name = sink or next((name for name in names if there.get(name)), next(iter(names), ""))
    return name, counts.sinks.get(name, Count())
