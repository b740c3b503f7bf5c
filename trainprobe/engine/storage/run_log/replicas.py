"""Rows that two ranks share are stored once: a segment may refer to a replica's segments for the rows that both hold.

A data-parallel replica holds the same parameters and reduced gradients as its neighbours, bit for bit. No rank knows that
while it trains, because the log never communicates. So `compact_segment` compares closed segments afterwards: rows that agree
with the reference in every column but `time` and `rank` are left out, and the segment's metadata says whose they are, and at
which steps. `expanded` puts them back. The row of kind `step` always stays, with the rank's own time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainprobe.engine.storage.dumps.layout import find_segments, log_folder
from trainprobe.engine.storage.run_log.live import STREAM
from trainprobe.engine.storage.run_log.schema import COLUMNS, FLOATS, WORDS
from trainprobe.engine.storage.run_log.segments import write_segment
from trainprobe.engine.storage.safe_files import regular
from trainprobe.errors import FormatError

SAME_AS = b"trainprobe.same_as"
LEAST_SHARED = 0.1  # a segment that shares less of its rows stays whole
_OWN = ("time", "rank")
_LISTS = tuple(name for name, (kind, _) in COLUMNS.items() if pa.types.is_list(kind))

Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SameAs:
    """What a compacted segment refers to. rank: the reference. steps: [first, last] of each run of steps that refer.

    segments: name of each segment of the reference → the identity of the stream that it was made of.
    """

    rank: int
    steps: tuple[tuple[int, int], ...]
    segments: dict[str, str]

    def covers(self, steps: I64) -> Bools:
        """Tell for each step [n] whether its missing rows are those of the reference."""
        return np.any([(steps >= first) & (steps <= last) for first, last in self.steps], axis=0)


def same_as(schema: pa.Schema) -> SameAs | None:
    """Return what a segment with this schema refers to, None for a whole one. Raises FormatError for damaged metadata."""
    text = (schema.metadata or {}).get(SAME_AS)
    if text is None:
        return None
    try:
        read = orjson.loads(text)
        return SameAs(int(read["rank"]), tuple((int(a), int(b)) for a, b in read["steps"]), dict(read["segments"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"what a compacted segment refers to cannot be read: {error!r}") from None


def schema_of(segment: Path) -> pa.Schema:
    """Return the schema of a closed segment. Raises FormatError for a file that is none."""
    try:
        return pq.read_schema(regular(segment))
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{segment} is no segment of a run log: {error}") from None


def read_segment(path: Path, columns: Sequence[str] | None = None, **options: Any) -> pa.Table:
    """Return the rows of a closed segment as they are stored. Raises FormatError for a file that is no segment."""
    try:
        return pq.read_table(regular(path), columns=columns, read_dictionary=list(WORDS), **options)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{path} is no segment of a run log: {error}") from None


# ---- storing once ------------------------------------------------------------------------------------------------------


def compact_segment(path: Path, reference: Path) -> bool:
    """Leave out of a closed segment what the rank in folder `reference` holds too; return whether the file has changed.

    path: a whole segment. Steps that either rank logged twice, or of which the reference has no closed segment, stay as they
    are. The file is replaced in one move once the new one is on disk.
    """
    own = read_segment(path)
    if own.num_rows == 0 or same_as(own.schema) is not None:
        return False
    steps = own["step"].to_numpy()
    others = _segments_with(reference, int(steps.min()), int(steps.max()))
    if not others or any(same_as(schema_of(other)) is not None for other in others):
        return False
    shared, referring = shared_rows(own, pa.concat_tables([read_segment(other) for other in others]))
    if not referring.size or shared.mean() < LEAST_SHARED:
        return False
    to = SameAs(_rank_of(reference), _runs(referring), {other.name: _stream_of(other) for other in others})
    write_segment(path, referring_table(own.filter(pa.array(~shared)), to))
    return True


def referring_table(kept: pa.Table, to: SameAs) -> pa.Table:
    """Return the rows that a compacted segment keeps, with what it refers to in its schema."""
    text = orjson.dumps({"rank": to.rank, "steps": to.steps, "segments": to.segments})
    return kept.replace_schema_metadata({**(kept.schema.metadata or {}), SAME_AS: text})


def shared_rows(own: pa.Table, reference: pa.Table) -> tuple[Bools, I64]:
    """Return which rows of a table the reference holds too, and the steps (ascending) whose rows may be left out."""
    shared = np.zeros(own.num_rows, bool)
    steps = np.intersect1d(_written_once(own), _written_once(reference))
    mine, theirs = (_placed(table, steps) for table in (own, reference))
    steps = steps[_as_many(own, mine, steps) == _as_many(reference, theirs, steps)]
    mine, theirs = (_placed(table, steps) for table in (own, reference))
    if not mine.size or any((own[n].take(mine) != reference[n].take(theirs)) for n in ("step", "position")):
        return shared, np.empty(0, np.int64)
    left, right = own.take(pa.array(mine)), reference.take(pa.array(theirs))
    equal = np.ones(len(mine), bool)
    for name in COLUMNS:
        if name not in _OWN:
            equal &= _equal(left[name].combine_chunks(), right[name].combine_chunks(), name)
    shared[mine[equal]] = True
    shared |= _known_layouts(own, reference)
    return shared, steps


def _written_once(table: pa.Table) -> I64:
    """Return the steps that a table holds once, ascending."""
    steps, count = np.unique(_of_kind(table, "step")["step"].to_numpy(), return_counts=True)
    return steps[count == 1]


def _placed(table: pa.Table, steps: I64) -> I64:
    """Return the rows of these steps that have a position, in the order of steps and positions."""
    step, position = table["step"].to_numpy(), table["position"].fill_null(-1).to_numpy()
    rows = np.flatnonzero((position >= 0) & np.isin(step, steps))
    return rows[np.lexsort([position[rows], step[rows]])]


def _as_many(table: pa.Table, rows: I64, steps: I64) -> I64:
    return np.bincount(np.searchsorted(steps, table["step"].to_numpy()[rows]), minlength=len(steps))


def _equal(left: pa.Array, right: pa.Array, name: str) -> Bools:
    """Tell for each row whether two columns hold the same bits; every NaN equals every other."""
    if left.null_count == right.null_count == len(left):
        return np.ones(len(left), bool)
    if name in _LISTS:
        return np.array([_bits_of(a) == _bits_of(b) for a, b in zip(left, right, strict=True)], bool)
    null = left.is_null().to_numpy(zero_copy_only=False), right.is_null().to_numpy(zero_copy_only=False)
    if name in FLOATS:
        numbers = [column.fill_null(0.0).to_numpy() for column in (left, right)]
        same = (numbers[0].view(np.int64) == numbers[1].view(np.int64)) | (np.isnan(numbers[0]) & np.isnan(numbers[1]))
        return (null[0] == null[1]) & same
    if name in WORDS:
        left, right = left.cast(pa.string()), right.cast(pa.string())
    same = pc.call_function("equal", [left, right]).fill_null(False).to_numpy(zero_copy_only=False)
    return same | (null[0] & null[1])


def _bits_of(numbers: pa.Scalar[Any]) -> bytes | None:
    return np.array(numbers.as_py(), np.float64).tobytes() if numbers.is_valid else None


def _known_layouts(own: pa.Table, reference: pa.Table) -> Bools:
    known = {(row["name"], row["detail"]) for row in _of_kind(reference, "layout").to_pylist()}
    found = np.zeros(own.num_rows, bool)
    rows = np.flatnonzero(np.array(own["kind"].to_pylist(), object) == "layout")
    found[rows] = [(row["name"], row["detail"]) in known for row in own.take(pa.array(rows)).to_pylist()]
    return found


def _of_kind(table: pa.Table, kind: str) -> pa.Table:
    return table.filter(pq.filters_to_expression([("kind", "==", kind)]))


def _runs(steps: I64) -> tuple[tuple[int, int], ...]:
    ends = [0, *(np.flatnonzero(np.diff(steps) != 1) + 1).tolist(), len(steps)]
    return tuple((int(steps[first]), int(steps[end - 1])) for first, end in pairwise(ends))


# ---- reading back ------------------------------------------------------------------------------------------------------


def expanded(path: Path, to: SameAs, columns: Sequence[str] | None) -> pa.Table:
    """Return the rows that a compacted segment had before, in any order. columns: those to read, None for all.

    Raises FormatError where the reference's segments are gone or were written anew.
    """
    needed = None if columns is None else [*dict.fromkeys((*columns, "step", "position", "kind", "time", "rank"))]
    own = read_segment(path, needed)
    reference = pa.concat_tables(read_segment(other, needed) for other in reference_segments(path, to))
    own_steps = _of_kind(own, "step")
    steps, times = own_steps["step"].to_numpy(), own_steps["time"].cast(pa.int64()).to_numpy()
    order = np.argsort(steps)
    steps, times = steps[order], times[order]
    covered = to.covers(steps)
    steps, times = steps[covered], times[covered]
    rows = _placed(reference, steps)
    rows = rows[~np.isin(_place_of(reference)[rows], _place_of(own))]
    taken = reference.take(pa.array(rows))
    layouts = _of_kind(reference, "layout")
    at = np.concatenate([np.searchsorted(steps, taken["step"].to_numpy()), np.zeros(layouts.num_rows, np.int64)])
    rest = pa.concat_tables([taken, layouts])
    rank = own["rank"][0].as_py()
    rest = _with_column(rest, "time", pa.array(times[at]).cast(own.schema.field("time").type))
    rest = _with_column(rest, "rank", pa.array(np.full(rest.num_rows, rank, np.int32)))
    rest = _with_column(rest, "step", pa.array(steps[at]))
    return pa.concat_tables([own, rest.replace_schema_metadata(own.schema.metadata)]).unify_dictionaries()


def reference_segments(path: Path, to: SameAs) -> list[Path]:
    """Return the segments that a compacted one refers to. Raises FormatError where one is gone or was written anew."""
    folder = log_folder(path.parent.parent, to.rank)
    for name, stream in to.segments.items():
        other = folder / name
        if not other.is_file() or _stream_of(other) != stream:
            state = "is not the file that it was compacted against" if other.is_file() else "is gone"
            raise FormatError(
                f"{path} holds what differs from {other}, which {state}: put that file back, or leave this rank out"
            )
    return [folder / name for name in to.segments]


def _place_of(table: pa.Table) -> I64:
    """Return a number for each row's step and position; -1 where it has no position."""
    position = table["position"].fill_null(-1).to_numpy().astype(np.int64)
    return np.where(position < 0, -1, (table["step"].to_numpy() << 24) + position)


def _with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)


# ---- segments of the reference -----------------------------------------------------------------------------------------


def _segments_with(folder: Path, first: int, last: int) -> list[Path]:
    """Return the segments of a rank that hold any of these steps."""
    return [segment for segment in find_segments(folder) if _overlaps(_steps_of(segment), first, last)]


def _overlaps(steps: Iterable[int], first: int, last: int) -> bool:
    low, high = steps
    return low <= last and high >= first


def _steps_of(segment: Path) -> tuple[int, int]:
    """Return the first and the last step of a segment, from its footer."""
    footer = pq.read_metadata(regular(segment))
    at = footer.schema.to_arrow_schema().get_field_index("step")
    found = [footer.row_group(i).column(at).statistics for i in range(footer.num_row_groups)]
    return min((s.min for s in found), default=0), max((s.max for s in found), default=-1)


def _stream_of(segment: Path) -> str:
    return _stream_in(segment, segment.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _stream_in(segment: Path, _changed: int) -> str:
    return (schema_of(segment).metadata or {}).get(STREAM, b"").decode()


def _rank_of(folder: Path) -> int:
    return int(folder.name.removeprefix("rank"))
