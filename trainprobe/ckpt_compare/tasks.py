"""The measuring itself: many small boxes, measured by threads, with the same result whatever their number.

A `Task` is one box held by two parts. Tasks are cut to at most `CHUNK` bytes a side, handed to threads in batches, and their
differences are merged in the order of the tasks, so that sums do not depend on who was faster. After a task its mapped pages
are let go: resident memory stays at a few chunks a thread, however large the files.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

from trainprobe.ckpt_compare.coverage import HeldBox, Overlap
from trainprobe.ckpt_compare.pieces import Source, bottom
from trainprobe.ckpt_compare.quantised import Quantised, within_codes
from trainprobe.ckpt_compare.storage.mapped import Mapped, each_file_once, forget_pages
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.measure import measure
from trainprobe.engine.geometry.rectangles import Rectangle
from trainprobe.errors import FormatError

CHUNK = 32 << 20  # bytes a side of one task
BATCH = 8 << 20  # bytes that are worth handing to a thread

Advance = Callable[[int], None]
Runner = Callable[[Sequence["MeasureTask"], int | None, Advance | None], list["TaskOutcome"]]


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """One box to measure; `row` says whose result it is a part of."""

    row: int
    box: Rectangle
    a: HeldBox
    b: HeldBox

    @property
    def size(self) -> int:
        """Bytes to read on both sides."""
        return self.box.count * (self.a.piece.source.format.itemsize + self.b.piece.source.format.itemsize)


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What became of a task: a difference, or why it could not be measured."""

    row: int
    difference: Difference
    failure: str = ""


def tasks_of(row: int, overlap: Overlap) -> Iterator[MeasureTask]:
    """Cut one overlap into tasks of bounded size."""
    for box in chunks(overlap.box, overlap.a.piece.source, overlap.b.piece.source):
        yield MeasureTask(row, box, overlap.a, overlap.b)


def chunks(box: Rectangle, *sources: Source) -> Iterator[Rectangle]:
    """Cut a box to at most `CHUNK` bytes of the first source; to less where numbers are decoded, which takes several arrays."""
    made = any(isinstance(bottom(source), Quantised) for source in sources)
    return _chunks(box, max(1, CHUNK // sources[0].format.itemsize // (8 if made else 1)))


def _chunks(box: Rectangle, limit: int) -> Iterator[Rectangle]:
    if box.count <= limit or not box.shape:
        yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    inner = math.prod(box.shape[axis + 1 :])
    step = max(1, limit // inner)
    for start in range(0, box.shape[axis], step):
        offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
        shape = (*box.shape[:axis], min(step, box.shape[axis] - start), *box.shape[axis + 1 :])
        yield from _chunks(Rectangle(offset, shape), limit)


def run(tasks: Sequence[MeasureTask], threads: int | None = None, advance: Advance | None = None) -> list[TaskOutcome]:
    """Measure all tasks and return their outcomes in the same order."""
    batches = list(_batches(tasks))
    count = min(len(batches), threads or os.cpu_count() or 1)

    def work(batch: Sequence[MeasureTask]) -> list[TaskOutcome]:
        with each_file_once():
            done = [perform(task) for task in batch]
        release_all({s for task in batch for s in (bottom(task.a.piece.source), bottom(task.b.piece.source))})
        if advance is not None:
            advance(sum(task.size for task in batch))
        return done

    if count <= 1:
        return [outcome for batch in batches for outcome in work(batch)]
    with ThreadPoolExecutor(count, thread_name_prefix="ckpt-compare") as pool:
        return [outcome for done in pool.map(work, batches) for outcome in done]


def _batches(tasks: Sequence[MeasureTask]) -> Iterator[Sequence[MeasureTask]]:
    start, size = 0, 0
    for i, task in enumerate(tasks):
        size += task.size
        if size >= BATCH:
            yield tasks[start : i + 1]
            start, size = i + 1, 0
    if start < len(tasks):
        yield tasks[start:]


def perform(task: MeasureTask) -> TaskOutcome:
    """Measure one task; a file that cannot be read becomes a failure with its name."""
    formats = task.a.piece.source.format, task.b.piece.source.format
    try:
        x, y = task.a.load(task.box), task.b.load(task.box)
        difference = measure(x, y, *formats)
        if difference.max_ulp > 1:
            difference = within_codes(task.a, task.b, task.box, difference, x, y)
    except FormatError as error:
        return TaskOutcome(task.row, Difference(), str(error))
    return TaskOutcome(task.row, difference.moved(task.box.offset))


def release(source: Source) -> None:
    """Let go of the resident pages of whatever file a source is mapped from."""
    release_all([bottom(source)])


def release_all(sources: Iterable[Source]) -> None:
    """Let go of the resident pages of arrays in files; of neighbours in one file at once."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for source in chain.from_iterable(s.parts.values() if isinstance(s, Quantised) else (s,) for s in sources):
        if isinstance(source, Mapped):
            path, start, stop = source.lies()
            spans.setdefault(path, []).append((start, stop))
    for path, held in spans.items():
        for start, stop in merged(held, mmap.PAGESIZE):
            forget_pages(path, start, stop)


def merged(spans: Iterable[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Join spans between which at most `gap` bytes lie, in order; empty ones are left out."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(s for s in spans if s[0] < s[1]):
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
