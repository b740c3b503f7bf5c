"""The stack machine that a pickle is a program for, written so that a hostile program costs no more than its own length.

It knows the opcodes of protocols 0 to 5 and nothing else: what a name means and what a call gives is decided by `Names`.
Lengths are checked before anything is read. The memo is a dict: an index costs one entry, whatever its size. Where nothing
follows the pickle, the memo holds only values that are fetched again, which `perhaps_fetched` finds beforehand: pickles memoize
every tuple, and would hold a million tensors' tuples until they end. A key is hashed only after it has been looked at: tuples
that hold the one before twice, sixty levels deep, would be hashed for ever. Opcodes: the standard library's `pickletools`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

from trainprobe.ckpt_compare.storage.pickle_fetches import perhaps_fetched
from trainprobe.ckpt_compare.storage.pickle_opcodes import OPCODES, UINT
from trainprobe.errors import FormatError

LONGEST_REPEAT, MOST_REPEATS = 1024, 32  # bytes of an object that may be used again; so many of them
_STOP, _SHORT_GET, _LONG_GET, _MEMOIZE = b".hj\x94"
_NOBODY, _NEVER = object(), object()  # no class yet; none in this pickle


class Names(Protocol):
    """What names in a pickle stand for, and what the machine may do with them."""

    def find(self, module: str, name: str) -> Any:
        """Return what stands for `module.name`."""
        ...

    def call(self, function: Any, args: Sequence[Any], keywords: dict[str, Any] | None = None) -> Any:
        """Return what a call gives."""
        ...

    def build(self, target: Any, state: Any) -> None:
        """Give an object its state."""
        ...

    def makes_unchanging(self, function: Any) -> bool:
        """Whether calls of a name make objects that never change after they have got their state."""
        ...

    def never_changes(self, made: Any) -> bool:
        """Whether this is such an object."""
        ...

    def append(self, target: Any, items: list[Any]) -> None:
        """Add items to an object that is no plain list."""
        ...

    def new_dict(self, before: Any) -> Any:
        """Return an empty dict, or what takes its place; `before` is the value that was made before it."""
        ...

    def insert(self, target: Any, entries: list[tuple[Any, Any]]) -> None:
        """Add entries to an object that is no plain dict."""
        ...

    def refer(self, pid: Any) -> Any:
        """Return what a reference to data outside of the pickle stands for."""
        ...


class Machine:
    """Runs one pickle. data: bytes, or a mapped file; at: where it begins. After `run`, `at` is the byte behind it.

    alone: whether nothing follows it in the data; only then the memo leaves out what nobody fetches.
    """

    __slots__ = (
        "alone", "at", "data", "end", "marks", "memo", "memoized", "names", "noted", "repeated", "repeats", "stack", "wanted",
    )  # fmt: skip

    def __init__(self, data: Any, names: Names, at: int = 0, alone: bool = False) -> None:
        self.data, self.names, self.at = data, names, at
        self.end = len(data)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.alone = alone
        self.wanted = perhaps_fetched(data) if alone else None  # None: every value is kept
        self.memo: dict[int, Any] = {}
        self.repeated: Any = _NOBODY if alone else _NEVER  # class of objects that never change, once the pickle has named it
        self.repeats: list[tuple[bytes, int, Any]] = []  # bytes, values that they memoize, the object that they make
        self.noted = 0, 0  # first byte of such an object, values memoized before it
        self.memoized = 0  # values that were memoized so far, those that nobody fetches included

    def run(self) -> Any:
        """Return the object. Raises FormatError, or what a damaged stream makes Python raise (IndexError, KeyError, …)."""
        data, opcodes, wanted, memo = self.data, OPCODES, self.wanted, self.memo
        at, last = self.at, -1 if wanted is None else len(wanted) - 1
        while (code := data[at]) != _STOP:
            at += 1
            if code == _MEMOIZE:  # this one and the fetches are half of all opcodes: a call for each would double the time
                if wanted is None or (self.memoized <= last and wanted[self.memoized]):
                    memo[self.memoized] = self.stack[-1]
                self.memoized += 1
            elif code == _SHORT_GET:
                value = memo[data[at]]
                if value is self.repeated:
                    at = self.repeat(at - 1)
                    continue
                self.stack.append(value)
                at += 1
            elif code == _LONG_GET:
                self.stack.append(memo[UINT.unpack_from(data, at)[0]])
                at += 4
            else:
                self.at = at
                opcodes[code](self)
                at = self.at
        self.at = at + 1
        return self.stack.pop()

    def repeat(self, start: int) -> int:
        """Push the object that the bytes from here make, if the same bytes have made one; return where to go on.

        At `start` the class of objects that never change is fetched. Equal bytes make equal objects as long as no index of the
        memo is used twice and nobody fetches what they memoize.
        """
        data, memoized, wanted = self.data, self.memoized, self.wanted or b""
        for text, memos, made in self.repeats:
            if data[start : start + len(text)] == text and wanted.find(1, memoized, memoized + memos) < 0:
                self.memoized += memos
                self.stack.append(made)
                return start + len(text)
        self.noted = start, memoized
        self.stack.append(self.repeated)
        return start + 2

    def named(self, found: Any) -> None:
        """Learn that the pickle names this, which may be the class of objects that never change."""
        if self.repeated is _NOBODY and self.names.makes_unchanging(found):
            self.repeated = found

    def built(self) -> None:
        """Keep the bytes that made an object which never changes, if they make it by themselves, on an empty stack."""
        if self.repeated in (_NOBODY, _NEVER) or not self.names.never_changes(self.stack[-1]):
            return
        start, memoized = self.noted
        text = self.data[start : self.at]
        if len(text) > LONGEST_REPEAT or (self.wanted or b"").find(1, memoized, self.memoized) >= 0:
            return
        alone = Machine(text + b".", self.names)
        alone.memo, alone.memoized, alone.wanted = self.memo, memoized, bytearray()
        try:
            made = alone.run()
        except (FormatError, IndexError, KeyError):
            return
        if not (alone.stack or alone.marks):
            self.repeats = [(text, alone.memoized - memoized, made), *self.repeats[: MOST_REPEATS - 1]]

    def bytes(self, count: int) -> bytes:
        """Read so many bytes."""
        start = self.at
        if count < 0 or start + count > self.end:
            raise FormatError(f"{count} bytes are announced and {self.end - start} are left")
        self.at = start + count
        return self.data[start : self.at]

    def line(self) -> bytes:
        """Read up to the end of the line, which is left out."""
        stop = self.data.find(b"\n", self.at)
        if stop < 0:
            raise FormatError("a line has no end")
        text = self.data[self.at : stop]
        self.at = stop + 1
        return text

    def number(self, kind: struct.Struct) -> Any:
        """Read one number of fixed size."""
        start = self.at
        self.at = start + kind.size
        if self.at > self.end:
            raise FormatError(f"{kind.size} bytes are announced and {self.end - start} are left")
        return kind.unpack_from(self.data, start)[0]

    def put(self, index: int) -> None:
        """Memoize the uppermost value under an index that the pickle gives, if it is fetched again."""
        self.memoized += 1
        self.repeated, self.repeats = _NEVER, []  # the index may be used twice
        wanted = self.wanted
        if wanted is None or (self.alone if index >= len(wanted) else wanted[index]):  # `perhaps_fetched` ends at its length
            self.memo[index] = self.stack[-1]

    def memoize(self, value: Any) -> None:
        """Memoize a value under the next index, if it is fetched again."""
        if self.wanted is None or (self.memoized < len(self.wanted) and self.wanted[self.memoized]):
            self.memo[self.memoized] = value
        self.memoized += 1

    def marked(self) -> list[Any]:
        """Take everything since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items
