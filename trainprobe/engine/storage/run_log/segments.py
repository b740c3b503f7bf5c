"""Closed parts of the run log: Parquet files that are written once, with checksums in their pages, and never changed.

Rows are sorted by kind, name, slot, phase, call, micro-batch and step, so that a series lies in one piece: a query for one name
reads little, and neighbouring numbers are similar, which halves the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trainprobe.engine.storage.dumps.layout import find_segments, find_streams, next_segment
from trainprobe.engine.storage.run_log.live import STREAM, LiveStream, read_stream
from trainprobe.engine.storage.run_log.schema import COLUMNS, FLOATS, SCHEMA, WORDS
from trainprobe.engine.storage.safe_files import NO_LINK, PRIVATE, regular
from trainprobe.errors import FormatError

ROW_GROUP = 1 << 17
Column: TypeAlias = "pa.Array | pa.ChunkedArray"
_SORTED = ("kind", "name", "slot", "phase", "call", "micro", "step", "position")


def live_table(folder: Path) -> pa.Table | None:
    """Return what stands in the streams of a rank's folder and in no segment, None where that is nothing."""
    found = [table for path in find_streams(folder) if (table := _table_of(path)) is not None]
    return pa.concat_tables(found).unify_dictionaries() if len(found) > 1 else next(iter(found), None)


def _table_of(stream: Path) -> pa.Table | None:
    schema, batches = read_stream(stream)
    if not batches or schema is None or any(_made_of(segment, schema) for segment in find_segments(stream.parent)[-2:]):
        return None
    return _joined(batches, schema)


def _joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Return batches of one stream as a table of one chunk."""
    return pa.Table.from_arrays([_whole_column(batches, name) for name in schema.names], schema=schema)


def _whole_column(batches: Sequence[pa.RecordBatch], name: str) -> pa.Array:
    """Return a column of batches of one stream. Dictionaries of a stream only grow: the last has all words."""
    arrays = [batch.column(name) for batch in batches]
    if name in WORDS:
        codes = pa.concat_arrays([array.indices for array in arrays])
        return pa.DictionaryArray.from_arrays(codes, arrays[-1].dictionary)
    if all(array.null_count == len(array) for array in arrays):
        return pa.nulls(sum(map(len, arrays)), arrays[0].type)
    return pa.concat_arrays(arrays)


def close_segment(folder: Path, live: LiveStream | None = None) -> None:
    """Turn a stream into a segment, or all streams in a rank's folder. live: one that this process has written.

    A stream goes once its segment is whole and on disk. After a kill between the two, the segment bears the name of the
    stream, which is passed over.
    """
    if live is not None:
        if live.batches:
            _write(next_segment(folder), live.schema, partial(_whole_column, live.batches))
        live.close()
        live.path.unlink(missing_ok=True)
        return
    for stream in find_streams(folder):
        table = _table_of(stream)
        if table is not None:
            write_segment(next_segment(folder), table)
        stream.unlink(missing_ok=True)


def last_time(folder: Path) -> int:
    """Return the time of the last step in the segments of a rank, in microseconds since 1970; 0 where there is none."""
    try:
        footers = [pq.read_metadata(regular(segment)) for segment in find_segments(folder)[-1:]]
    except (pa.ArrowException, FormatError, OSError):
        return 0  # a damaged one is named where it is read
    groups = [
        footer.row_group(i).column(SCHEMA.get_field_index("time")) for footer in footers for i in range(footer.num_row_groups)
    ]
    times = [group.statistics.max for group in groups if group.statistics is not None]
    return max((int(pa.scalar(time, COLUMNS["time"][0]).value) for time in times), default=0)


def _made_of(segment: Path, stream: pa.Schema) -> bool:
    """Tell whether a segment was made of the stream with this schema; one that cannot be read was not."""
    try:
        return (pq.read_schema(regular(segment)).metadata or {}).get(STREAM) == (stream.metadata or {}).get(STREAM)
    except (pa.ArrowException, FormatError, OSError):
        return False


def write_segment(path: Path, table: pa.Table) -> None:
    """Write rows as a segment that is whole or not there; one of this name is replaced."""
    _write(path, table.schema, table.column)


def _write(path: Path, schema: pa.Schema, column: Callable[[str], Column]) -> None:
    draft = path.with_name(f".{path.name}.partial")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0), PRIVATE)
    with os.fdopen(handle, "wb") as file:
        pq.write_table(
            _sorted(schema, column),
            file,
            row_group_size=ROW_GROUP,
            write_batch_size=1 << 15,  # a tenth less CPU than by default, 1024
            compression="zstd",
            compression_level=3,
            use_dictionary=[*WORDS, "crc32"],  # pyright: ignore[reportArgumentType]
            use_byte_stream_split=list(FLOATS),  # pyright: ignore[reportArgumentType]
            write_page_checksum=True,
            write_page_index=True,
        )
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _sorted(schema: pa.Schema, column: Callable[[str], Column]) -> pa.Table:
    """Return the rows in order, column by column: what is not sorted yet is in memory of one column at a time."""
    order = pa.array(_order(column))
    whole = (column(name) for name in schema.names)
    return pa.Table.from_arrays([one if one.null_count == len(one) else one.take(order) for one in whole], schema=schema)


def _order(column: Callable[[str], Column]) -> npt.NDArray[np.int64]:
    """Return the rows as `_SORTED` sorts them: the first keys as one number, as far as they fit into 63 bits, then the next."""
    joined: list[tuple[npt.NDArray[np.int64], int]] = []
    for name in _SORTED:
        key = _key(column(name))
        least, values = (int(key.min()), int(np.ptp(key)) + 1) if key.size else (0, 1)
        if joined and joined[-1][1] * values < 1 << 63:
            joined[-1] = joined[-1][0] * values + (key - least), joined[-1][1] * values
        else:
            joined.append((key - least, values))
    return np.lexsort([key for key, _ in reversed(joined)])


def _key(column: Column) -> npt.NDArray[np.int64]:
    """Return numbers that sort as the column does, null first."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(array.type):
        words: Sequence[str] = array.dictionary.to_pylist()
        rank = np.empty(len(words) + 1, np.int64)
        rank[np.argsort(np.array(words, dtype=object), kind="stable")] = np.arange(len(words))
        rank[-1] = -1
        return rank[array.indices.fill_null(-1).to_numpy()]
    return array.fill_null(-1).to_numpy().astype(np.int64)
