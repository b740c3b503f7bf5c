"""The steps of a run, one after the other, with the frames of all its ranks: from its dumps or from its run log."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from trainprobe.engine.core.addresses import Address, stage_and_address
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import StoredStepData, numbers_of_rows, slots
from trainprobe.engine.storage.dumps import not_read, read
from trainprobe.engine.storage.dumps.layout import DEBUG_FILE, DUMP_FILE, find_dumps, holds_dump
from trainprobe.engine.storage.kernel_dumps.file_names import parse_name
from trainprobe.engine.storage.kernel_dumps.read import KERNEL_LEVEL, overflows_of
from trainprobe.errors import FormatError
from trainprobe.monitor.frames import Frame, SeriesTable, frame_of_records
from trainprobe.monitor.nonfinite_values import that_matter
from trainprobe.monitor.run_folder import find_logs, frames_of_log, steps_of_log


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank. step_data: where the step was read from a dump, which knows parents, stacks and extremes.

    overflows: what the device itself reported of overflows, a sentence each; in dumps of kernels alone.
    """

    rank: int
    frame: Frame
    step_data: StoredStepData | None = None
    overflows: Sequence[str] = ()

    @property
    def kernels(self) -> bool:
        """Tell whether the step was read from a dump of kernels."""
        return self.step_data is not None and self.step_data.level == KERNEL_LEVEL

    @property
    def unread(self) -> Sequence[str]:
        """Return what of the step's dump could not be read."""
        return () if self.step_data is None else not_read(self.step_data)

    def call_at(self, address: Address) -> Call | None:
        """Return the call that holds the value at an address; None where the step was not read from a dump."""
        if self.step_data is None:
            return None
        return next(
            (
                call
                for call in self.step_data.calls
                if any(stage_and_address(call, slot)[1] == address for slot, _ in slots(call))
            ),
            None,
        )

    def numbers(self, call: Call) -> Iterator[tuple[str, str, tuple[int, ...], Mapping[str, float]]]:
        """Yield (slot, dtype, shape, statistics) of each value of a call of the dump."""
        assert self.step_data is not None
        columns = numbers_of_rows(self.step_data)
        for slot, value in slots(call):
            numbers = {name: column[value.row] for name, column in columns.items() if value.row >= 0}
            yield slot, value.dtype, value.shape, {name: number for name, number in numbers.items() if number is not None}


def steps_of(path: Path) -> Iterator[list[RankStep]]:
    """Yield the ranks of each step, in order. Raises FormatError where there is neither a dump nor a run log, or several runs.

    path: the folder that a run wrote to, a step or a rank of it, a `dump.json`, or one dump file of a kernel.
    """
    dumps, logs = _dumps(path), find_logs(path)
    if not dumps and not logs:
        raise FormatError(f"{path} holds no dump and no run log: name the folder that a run wrote to, or a step or rank of it")
    of_dumps = ((step, 0, ranks) for step, ranks in sorted(dumps.items()))
    of_logs = ((ranks[0].frame.step, 1, ranks) for ranks in _of_logs(path, logs))
    for _, found in groupby(heapq.merge(of_dumps, of_logs, key=itemgetter(0, 1)), key=itemgetter(0)):
        logged: list[RankStep] = []
        dumped: list[RankStep] = []
        for _, _, ranks in found:
            if isinstance(ranks, dict):
                dumped = [_read(folder) for _, folder in sorted(ranks.items())]
            else:
                logged = ranks
        yield _told_by_either(dumped, logged)


def _told_by_either(dumped: list[RankStep], logged: list[RankStep]) -> list[RankStep]:
    """Return each rank once: from its dump, which tells more, unless only the log has what is not finite.

    A dump may hold some modules of a step alone, and some of the ranks.
    """
    of_log = {here.rank: here for here in logged}
    of_dump = {here.rank: here for here in dumped if here.rank not in of_log or here.kernels or that_matter(here.frame).any()}
    return [here for _, here in sorted({**of_log, **of_dump}.items())]


def _of_logs(path: Path, logs: list[Path]) -> Iterator[list[RankStep]]:
    """Yield the ranks of each step. A run that went back has some steps more than once: the last time that a rank recorded a
    step belongs to the last time that the others did, the one before to the one before.
    """
    orders = [_in_order([step for step, _ in steps_of_log(log)]) for log in logs]
    frames = [frames_of_log(log) for log in logs]
    for members in _aligned(orders):
        ranks: dict[int, RankStep] = {}
        for i in members:
            frame = next(frames[i])
            if frame.place.rank in ranks:
                raise FormatError(f"{path} holds several runs: name one of them (`trainprobe runs {path}` lists them)")
            ranks[frame.place.rank] = RankStep(frame.place.rank, frame)
        yield [here for _, here in sorted(ranks.items())]


def _in_order(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the steps with how often each comes again later."""
    left = Counter(steps)
    found: list[tuple[int, int]] = []
    for step in steps:
        left[step] -= 1
        found.append((step, left[step]))
    return found


def _aligned(orders: Sequence[Sequence[tuple[int, int]]]) -> Iterator[list[int]]:
    """Yield who comes next: all that have the same step next, once none of the others still has it before itself."""
    at = [0] * len(orders)
    ahead = Counter(key for order in orders for key in order)
    while any(here < len(order) for here, order in zip(at, orders, strict=True)):
        nexts: dict[tuple[int, int], list[int]] = {}
        for i, order in enumerate(orders):
            if at[i] < len(order):
                nexts.setdefault(order[at[i]], []).append(i)
        whole = [key for key, members in nexts.items() if len(members) == ahead[key]]
        key = min(whole or nexts)
        for i in nexts[key]:
            at[i] += 1
        ahead[key] -= len(nexts[key])
        yield nexts[key]


def _dumps(path: Path) -> dict[int, dict[int, Path]]:
    """Return step → rank → folder of the dumps at a path."""
    if path.is_file() and path.name not in (DUMP_FILE, DEBUG_FILE):
        return {0: {0: path}} if parse_name(path) else {}
    held = {step: {rank: at for rank, at in ranks.items() if holds_dump(at)} for step, ranks in find_dumps(path).items()}
    return {step: ranks for step, ranks in held.items() if ranks}


def _read(folder: Path) -> RankStep:
    step_data = read(folder)
    frame = frame_of_records(step_data.step, step_data.place, step_data.records(), SeriesTable(), step_data.complete)
    reported = overflows_of(folder) if step_data.level == KERNEL_LEVEL else []
    return RankStep(step_data.place.rank, frame, step_data, [f"{overflow}: {_kernels(ran)}" for overflow, ran in reported])


def _kernels(names: Sequence[str]) -> str:
    return " or ".join(names) if names else "the dump holds no kernel of that task"
