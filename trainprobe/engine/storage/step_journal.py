"""The journal of a step: its contents so far, written immediately into memory that may outlive the process.

    used, step, left out     uint64, int64, uint64: bytes of records; the step; records for which there was no room

The records follow, each a line of JSON, a list that begins with a letter:

    H, about                                   about the run
    V, number, head, note, row, checksum       a value: what it is, and its partials in base64, null without them
    T, number, of, note                        the same value with a note of its own
    C, number, call                            a call, with the number of the enclosing one
    F, number, field, tree                     a tree of a call: args, kwargs, out or params
    S, name, tree                              a scalar
    B, fingerprint                             of a batch

Calls and trees are as in a line of the record log. A record counts once `used` includes it, which is written last: whatever
ends the process, the memory holds complete records. Numbers that are still on a device are missing.
"""

from __future__ import annotations

import binascii
import struct
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trainprobe.engine.core.records import Call, StepData, Value
from trainprobe.engine.stats.partials import PARTIALS, finish
from trainprobe.engine.storage.dumps.header import read_place
from trainprobe.engine.storage.dumps.record_log import OPTIONS, TREES, call_head, described, read_call, read_tree, tree_text
from trainprobe.engine.storage.left_out import DAMAGED

HEAD = 24
ON_DEVICE = "its numbers were still on the device when the process ended"
_ALL = (1 << len(TREES)) - 1


class StepJournal:
    """Writes what a step brings into memory, uint8 [n]. Everything is dropped between `end` and the next `begin`.

    A step may bring something on several threads. The values and calls of a step are held until it ends.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._open = True
        self._follows = False  # a step is in progress
        self._lock = threading.RLock()
        self._used = self._left_out = 0
        self._full = False  # what does not fit is left out from there on
        self._values: dict[Value, int] = {}
        self._heads: dict[tuple[Any, ...], int] = {}
        self._calls: dict[Call, int] = {}

    def begin(self, step: int, about: bytes) -> None:
        """A step begins. about: JSON of what all of it has in common (see `read_journal`)."""
        with self._lock:
            if self._open:
                self._forget()
                struct.pack_into("<QqQ", self._memory, 0, 0, step, 0)
                self._follows = True
                self._append(b'["H",' + about + b"]\n")

    def end(self) -> None:
        """The step is kept elsewhere."""
        with self._lock:
            self._follows = False
            self._forget()
            if self._open:
                struct.pack_into("<Q", self._memory, 0, 0)

    def close(self) -> None:
        """Let go of the memory: what comes afterwards is dropped."""
        with self._lock:
            self._follows = self._open = False
            self._memory.release()
            self._forget()

    def value(self, value: Value, row: bytes | None, checksum: int) -> None:
        """A value was looked at. row: its partials, None while they are on a device."""
        with self._lock:
            if self._follows:
                self._value(value, row, checksum)

    def twin(self, twin: Value, value: Value) -> None:
        """The same value has a twin with a note of its own."""
        with self._lock:
            if self._follows and value in self._values:
                self._write("T", self._values.setdefault(twin, len(self._values)), self._values[value], twin.note)

    def call(self, call: Call, fields: int = _ALL) -> None:
        """More is known of a call. fields: which of its trees have come or changed, a bit for each."""
        with self._lock:
            if not self._follows:
                return
            number = self._calls.get(call)
            if number is None:
                number = self._calls[call] = len(self._calls)
                parent = self._calls.get(call.parent) if isinstance(call.parent, Call) else None
                self._write("C", number, call_head(call, parent))
            for i, name in enumerate(TREES):
                tree = getattr(call, name) if fields >> i & 1 else None
                if tree is not None:
                    self._write_tree("F", number, i, tree=tree)

    def scalar(self, name: str, x: Any) -> None:
        """A scalar of the step: a Value or a number."""
        with self._lock:
            if self._follows:
                self._write_tree("S", name, tree=x)

    def batch(self, fingerprint: int) -> None:
        """What the model was called with."""
        with self._lock:
            if self._follows:
                self._write("B", fingerprint)

    def _value(self, value: Value, row: bytes | None = None, checksum: int = 0) -> int:
        number = self._values.setdefault(value, len(self._values))
        head = value.type, value.dtype, value.shape, value.device, value.requires_grad
        known = self._heads.get(head)
        if known is None:
            self._heads[head] = len(self._heads)
        packed = None if row is None else binascii.b2a_base64(row, newline=False).decode()
        self._write("V", number, head if known is None else known, value.note, packed, checksum)
        return number

    def _number(self, value: Value) -> int:
        known = self._values.get(value)
        return self._value(value) if known is None else known

    def _write_tree(self, *about: Any, tree: Any) -> None:
        try:
            text = tree_text(tree, self._number)
        except RecursionError:
            self._leave_out()
        else:
            self._write(*about, text)

    def _write(self, *record: Any) -> None:
        try:
            line = orjson.dumps(record, default=described, option=OPTIONS | orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # it nests too deep, or is no text
            self._leave_out()
        else:
            self._append(line)

    def _append(self, line: bytes) -> None:
        begin = HEAD + self._used
        if self._full or begin + len(line) > len(self._memory):
            self._full = True
            self._leave_out()
            return
        self._memory[begin : begin + len(line)] = line
        self._used += len(line)
        struct.pack_into("<Q", self._memory, 0, self._used)

    def _leave_out(self) -> None:
        self._left_out += 1
        struct.pack_into("<Q", self._memory, 16, self._left_out)

    def _forget(self) -> None:
        self._used, self._left_out, self._full = 0, 0, False
        self._values, self._heads, self._calls = {}, {}, {}


# ---- reading ----------------------------------------------------------------------------------------------------------


class _Reader:
    """What the records of a journal say, one after the other."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.values: list[Value] = []
        self.rows: list[npt.NDArray[np.float64]] = []
        self.checksums: list[int] = []
        self.scalars: dict[str, Any] = {}
        self.batches: list[int] = []
        self.calls: dict[int, Call] = {}
        self.last: Call | None = None
        self._heads: list[Any] = []
        self._known: Any = defaultdict(lambda: None)  # values by number
        self._read = {"V": self._value, "T": self._twin, "C": self._call, "F": self._field, "S": self._scalar}

    def record(self, line: bytes) -> None:
        letter, *about = orjson.loads(line)
        if letter == "H":
            (self.about,) = about
        elif letter == "B":
            self.batches += about
        else:
            self._read[letter](*about)

    def _value(self, number: int, head: Any, note: str | None, row: str | None, checksum: int) -> None:
        if not isinstance(head, int):
            self._heads.append(head)
            head = -1
        kind, dtype, shape, device, grad = self._heads[head]
        value = Value(-1, dtype, tuple(shape), type=kind, device=device, requires_grad=grad, note=note)
        if row is not None:
            value.row = len(self.rows)
            self.rows.append(np.frombuffer(binascii.a2b_base64(row), np.float64))
            self.checksums.append(checksum)
        elif note is None:
            value.note = ON_DEVICE
        self._keep(number, value)

    def _twin(self, number: int, of: int, note: str | None) -> None:
        self._keep(number, self._known[of].with_note(note))

    def _keep(self, number: int, value: Value) -> None:
        self.values.append(value)
        self._known[number] = value

    def _call(self, number: int, text: dict[str, Any]) -> None:
        parent = text.get("parent")
        call = self.calls[number] = read_call(text, self._known)
        call.parent = self.calls[parent] if isinstance(parent, int) else parent

    def _field(self, number: int, field: int, tree: Any) -> None:
        self.last = self.calls[number]
        setattr(self.last, TREES[field], read_tree(tree, self._known))

    def _scalar(self, name: str, tree: Any) -> None:
        self.scalars[name] = read_tree(tree, self._known)


def read_journal(data: bytes | memoryview) -> tuple[StepData, Call | None] | None:
    """Return (the step in progress, the call that was seen last) of a journal, uint8 [n]; None where no step was in progress.

    The step is marked incomplete; its calls are in the order in which they began. Its notes say what had no room. A record that
    is damaged ends it.
    """
    used, step, left_out = struct.unpack_from("<QqQ", data)
    reader = _Reader()
    try:
        for line in bytes(data[HEAD : HEAD + used]).splitlines():
            reader.record(line)
    except DAMAGED:
        pass
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
        calls=list(reader.calls.values()),
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
