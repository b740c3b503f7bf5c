"""The stream of the steps since the last segment: whole record batches, one after the other, in Arrow's streaming format.

A batch goes to the operating system in one write, so a kill tears at most the one in flight; what comes before it is read.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc

from trainprobe.engine.storage.run_log.schema import SCHEMA
from trainprobe.engine.storage.safe_files import NO_LINK, PRIVATE, regular

STREAM = b"trainprobe.stream"  # names a stream in its schema, and in that of the segment which is made of it
_OPTIONS = ipc.IpcWriteOptions(compression="lz4", use_threads=False, emit_dictionary_deltas=True)


class _Pieces:
    """What a writer of Arrow's writes, until it is on the disk."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: pa.Buffer | bytes) -> int:
        """Keep some bytes."""
        self._pieces.append(bytes(data))
        return len(self._pieces[-1])

    def flush(self) -> None:
        """Do nothing: nothing lies in between."""

    def all(self) -> bytes:
        """Return what was kept."""
        return b"".join(self._pieces)

    def clear(self) -> None:
        """Forget it."""
        self._pieces.clear()


class LiveStream:
    """Appends record batches to a file that must not exist yet, and keeps them, so that nobody has to read them again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches: list[pa.RecordBatch] = []
        self.size = self.rows = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0), PRIVATE)
        self._pieces = _Pieces()
        self.schema = SCHEMA.with_metadata({**SCHEMA.metadata, STREAM: secrets.token_hex(8)})
        self._writer = ipc.new_stream(pa.PythonFile(self._pieces, mode="w"), self.schema, options=_OPTIONS)

    @property
    def removed(self) -> bool:
        """Tell whether somebody has removed the file."""
        return os.fstat(self._file).st_nlink == 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch. Raises OSError where the disk refuses: the batch waits then for the next `append`."""
        self._writer.write_batch(batch)
        self.batches.append(batch)
        self.rows += batch.num_rows
        self.append()

    def move(self, path: Path) -> None:
        """Give the file another name. Raises OSError."""
        self.path = self.path.replace(path)

    def append(self) -> None:
        """Append what waits. Raises OSError where the disk refuses; a part that was written is taken back."""
        data = self._pieces.all()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self._pieces.clear()
        self.size += len(data)

    def close(self) -> None:
        """Close the file, behind its last whole batch."""
        os.close(self._file)


def read_stream(path: Path) -> tuple[pa.Schema | None, list[pa.RecordBatch]]:
    """Return the schema and the whole batches of a stream; one that a kill has torn ends it. Without a schema: (None, [])."""
    batches: list[pa.RecordBatch] = []
    schema = None
    try:
        with pa.memory_map(str(regular(path))) as file, ipc.open_stream(file) as stream:  # a length that lies reserves nothing
            schema = stream.schema
            while True:
                batches.append(stream.read_next_batch())
    except (StopIteration, pa.ArrowException, MemoryError, OSError):  # the end, or where a kill tore it
        return schema, batches
