"""The journal of a step: what it has brought so far, written as it comes into memory that may outlive the process.

    used, step, left out     uint64, int64, uint64: bytes of records; the step; records for which there was no room
    record                   its whole length (uint32), a letter, and what the letter says:

    H   about the run, as JSON                       V   a value: who it is, what it is, and its numbers
    C   a call: who it is, its parent, its name …    T   the same value with a note of its own: who it is, whose twin, the note
    F   a tree of a call: args, kwargs, out, params  S   a scalar: its name and a tree
    B   the fingerprint of a batch

Values and calls are identified by the object's address while the step runs (uint64). Texts have their length before them
(uint16), columns of partials that are zero are left out (a mask of uint16 says which). A record counts when `used` says so,
which is written last: whatever ends the process, the memory holds whole records. Numbers that are on a device are not there.

`native/step_journal.c` writes it, 0.1 µs a record; here it is read.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from trainprobe.compiled import recording
from trainprobe.engine.core.records import Call, Opaque, StepData, Value
from trainprobe.engine.stats.partials import PARTIALS, finish
from trainprobe.engine.storage.dumps.header import read_place

HEAD = 24
ON_DEVICE = "its numbers were still on the device when the process ended"
_TREES = ("args", "kwargs", "out", "params")
_NONE = -(1 << 63)


class StepJournal(Protocol):
    """What is recorded of a step. Everything is dropped between `end` and the next `begin`, and after `close`."""

    def begin(self, step: int, about: bytes) -> None:
        """A step begins. about: JSON of what all of it has in common (see `read_journal`)."""
        ...

    def end(self) -> None:
        """The step is kept elsewhere."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...

    def value(self, value: Value, row: bytes | None, checksum: int) -> None:
        """A value was looked at. row: its partials, None while they are on a device."""
        ...

    def twin(self, twin: Value, value: Value) -> None:
        """The same value has a twin with a note of its own."""
        ...

    def call(self, call: Call) -> None:
        """A call is like this now."""
        ...

    def scalar(self, name: str, x: Any) -> None:
        """A scalar of the step: a Value or a number."""
        ...

    def batch(self, fingerprint: int) -> None:
        """What the model was called with."""
        ...


def open_journal(memory: memoryview) -> StepJournal:
    """Return a journal in this memory, uint8 [n]."""
    held = np.frombuffer(memory, np.uint8)
    return recording.StepJournal(held.__array_interface__["data"][0], held.size, held)


# ---- reading ----------------------------------------------------------------------------------------------------------


class _Cursor:
    """Takes one thing after the other from bytes. Raises struct.error where they end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def text(self) -> str | None:
        (size,) = self.take("H")
        (data,) = self.take(f"{size}s")
        return data.decode(errors="replace") or None

    def rest(self) -> bytes:
        return bytes(self._data[self._at :])


class _Reader:
    """What the records of a journal say, one after the other."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.rows: list[npt.NDArray[np.float64]] = []
        self.checksums: list[int] = []
        self.scalars: dict[str, Any] = {}
        self.batches: list[int] = []
        self.last: Call | None = None
        self._calls: dict[int, Call] = {}
        self._values: dict[int, Value] = {}
        self._read = {"H": self._head, "V": self._value, "T": self._twin, "C": self._call, "F": self._field, "S": self._scalar}

    def record(self, letter: str, data: memoryview) -> None:
        cursor = _Cursor(data)
        if letter == "B":
            self.batches += cursor.take("Q")
        else:
            self._read[letter](cursor)

    def _head(self, c: _Cursor) -> None:
        self.about = orjson.loads(c.rest())

    def _value(self, c: _Cursor) -> Value:
        who, flags, nd = c.take("QBB")
        shape = c.take(f"{nd}q")
        kind, dtype, device, note = c.text(), c.text(), c.text(), c.text()
        grad = {2: True, 4: False}.get(flags & 6)
        value = Value(-1, dtype or "", shape, type=kind or "", device=device or "", requires_grad=grad, note=note)
        if flags & 1:
            (mask,) = c.take("H")
            row = np.zeros(len(PARTIALS))
            there = [i for i in range(len(PARTIALS)) if mask >> i & 1]
            row[there] = c.take(f"{len(there)}d")
            value.row = len(self.rows)
            self.rows.append(row)
            self.checksums += c.take("Q")
        elif note is None:
            value.note = ON_DEVICE
        self.values.append(value)
        self._values[who] = value
        return value

    def _twin(self, c: _Cursor) -> None:
        who, whose = c.take("QQ")
        self._values[who] = self._values[whose].with_note(c.text())
        self.values.append(self._values[who])

    def _call(self, c: _Cursor) -> None:
        who, above, number, micro = c.take("QQqq")
        kind, name, phase, cls, node, parent = (c.text() for _ in range(6))
        call: Any = Call(
            kind or "",  # pyright: ignore[reportArgumentType]
            name or "",
            number,
            phase or "",  # pyright: ignore[reportArgumentType]
            cls=cls or "",
            micro=None if micro == _NONE else micro,
            parent=self._calls.get(above, parent),
        )
        call.node = node
        self._calls[who] = call
        self.calls.append(call)

    def _field(self, c: _Cursor) -> None:
        who, field = c.take("QB")
        self.last = self._calls[who]
        setattr(self.last, _TREES[field], self._tree(c))

    def _scalar(self, c: _Cursor) -> None:
        name = c.text() or ""
        self.scalars[name] = self._tree(c)

    def _tree(self, c: _Cursor) -> Any:
        letter = chr(*c.take("B"))
        if letter in "iqd":
            return c.take("q" if letter == "i" else "d")[0]
        if letter == "v":
            return self._values.get(*c.take("Q"))
        if letter == "l":
            return [self._tree(c) for _ in range(*c.take("I"))]
        if letter == "m":
            return {c.text() or "": self._tree(c) for _ in range(*c.take("I"))}
        if letter in "so":
            text = c.text() or ""
            return text if letter == "s" else Opaque(text, None)
        return self._value(c) if letter == "w" else {"t": True, "f": False}.get(letter)


def read_journal(data: bytes | memoryview) -> tuple[StepData, Call | None] | None:
    """Return (the step in progress, the call that was seen last) of a journal, uint8 [n]; None where no step was in progress.

    The step is marked incomplete; its calls are in the order in which they began. Its notes say what had no room.
    """
    whole = memoryview(data)
    used, step, left_out = struct.unpack_from("<QqQ", whole)
    reader, at, end = _Reader(), HEAD, min(HEAD + used, len(whole))
    while at + 5 <= end:
        size, letter = struct.unpack_from("<IB", whole, at)
        if size < 5 or at + size > end:
            break
        reader.record(chr(letter), whole[at + 5 : at + size])
        at += size
    if not reader.about:
        return None
    about = reader.about
    rows = np.array(reader.rows) if reader.rows else np.zeros((0, len(PARTIALS)))
    sums = np.array(reader.checksums, np.uint64)
    return StepData(
        step=step,
        place=read_place(about["place"]),
        framework=about["framework"],
        level=about["level"],
        task=about["task"],
        statistics=tuple(about["wanted"]),
        calls=reader.calls,
        values=reader.values,
        partials=rows,
        checksums=sums if sums.any() else None,
        scalars={name: _number(x, rows) for name, x in reader.scalars.items()},
        batches=reader.batches,
        notes=(f"the last {left_out} things that this step brought had no room: raise `max_bytes` of `black_box`",)
        * (left_out > 0),
        complete=False,
    ), reader.last


def _number(x: Any, rows: npt.NDArray[np.float64]) -> float:
    if not isinstance(x, Value):
        return float("nan") if x is None else float(x)
    return float(finish(rows[x.row : x.row + 1], ("mean",))["mean"][0]) if x.row >= 0 else float("nan")
