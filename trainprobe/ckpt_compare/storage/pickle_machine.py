"""The stack machine that a pickle is a program for, written so that a hostile program costs no more than its own length.

It knows the opcodes of protocols 0 to 5 and nothing else: what a name means and what a call gives is decided by `Names`.
Lengths are checked before anything is read. The memo is a dict: an index costs one entry, whatever its size. Where nothing
follows the pickle, the memo holds only values that are fetched again, which `perhaps_fetched` finds beforehand: pickles memoize
every tuple, and would hold a million tensors' tuples until they end. A key is hashed only after it has been looked at: tuples
that hold the one before twice, sixty levels deep, would be hashed for ever. Opcodes: the standard library's `pickletools`.
"""

from __future__ import annotations

import codecs
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainprobe.ckpt_compare.storage.mapped import forget_behind
from trainprobe.ckpt_compare.storage.pickle_fetches import perhaps_fetched
from trainprobe.errors import FormatError

LARGEST_INTEGER = 1024  # bytes of an integer
LONGEST_REPEAT, MOST_REPEATS = 1024, 32  # bytes of an object that may be used again; so many of them
_NOBODY, _NEVER = object(), object()  # no class yet; none in this pickle
LARGEST_KEY = 1000  # values inside one key of a dict or member of a set


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
        data, opcodes, wanted, memo = self.data, _OPCODES, self.wanted, self.memo
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
                self.stack.append(memo[_UINT.unpack_from(data, at)[0]])
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

    def built(self) -> None:
        """Keep the bytes that made an object which never changes, if they make it by themselves, on an empty stack."""
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


def check_key(key: Any) -> Any:
    """Return a key that can be hashed within reason; raise FormatError for any other."""
    left, pending = LARGEST_KEY, [key]
    while pending:
        one = pending.pop()
        left -= 1
        if isinstance(one, (tuple, frozenset)):
            pending.extend(one)  # pyright: ignore[reportUnknownArgumentType]
        if left < 0 or len(pending) > LARGEST_KEY:
            raise FormatError(f"a key is made of more than {LARGEST_KEY} values")
    return key


_BYTE, _SHORT, _INT, _UINT, _LONG = (struct.Struct(f"<{c}") for c in "BHiIQ")
_DOUBLE = struct.Struct(">d")
_STOP, _SHORT_GET, _LONG_GET, _MEMOIZE = b".hj\x94"


def _unknown(m: Machine) -> None:
    raise FormatError(f"byte {m.at - 1} is {m.data[m.at - 1]:#04x}, which is no opcode")


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.marked()


def _integer_line(m: Machine) -> int | bool:
    text = m.line()
    return text == b"01" if text in (b"00", b"01") else int(text)


def _long_line(m: Machine) -> int:
    return int(m.line().removesuffix(b"L"))


def _long(m: Machine, count: int) -> int:
    if count > LARGEST_INTEGER:
        raise FormatError(f"an integer of {count} bytes")
    return int.from_bytes(m.bytes(count), "little", signed=True)


def _string_line(m: Machine) -> str:
    text = m.line()
    if len(text) < 2 or text[0] != text[-1] or text[0] not in b"\"'":
        raise FormatError("a text without its quotes")
    return codecs.escape_decode(text[1:-1])[0].decode("latin1")  # pyright: ignore


def _text(m: Machine, count: int) -> str:
    return m.bytes(count).decode("utf-8", "surrogatepass")


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    return {check_key(items[i]): items[i + 1] for i in range(0, len(items), 2)}


def _append(m: Machine) -> None:
    item = m.stack.pop()
    _extend(m, [item])


def _appends(m: Machine) -> None:
    _extend(m, m.marked())


def _extend(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target.extend(items)  # pyright: ignore[reportUnknownMemberType]
    else:
        m.names.append(target, items)


def _set_item(m: Machine) -> None:
    value = m.stack.pop()
    _insert(m, [m.stack.pop(), value])


def _set_items(m: Machine) -> None:
    _insert(m, m.marked())


def _insert(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if isinstance(target, dict):
        for i in range(0, len(items), 2):
            key = items[i]
            target[sys.intern(key) if type(key) is str else check_key(key)] = items[i + 1]
    else:
        m.names.insert(target, [(check_key(items[i]), items[i + 1]) for i in range(0, len(items), 2)])


def _add_items(m: Machine) -> None:
    items = m.marked()
    target = m.stack[-1]
    if isinstance(target, set):
        target.update([check_key(one) for one in items])  # pyright: ignore[reportUnknownMemberType]
    else:
        m.names.append(target, items)


def _name(m: Machine) -> Any:
    module = m.line().decode("utf-8")
    return m.names.find(module, m.line().decode("utf-8"))


def _stack_name(m: Machine) -> None:
    name = m.stack.pop()
    module = m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise FormatError("a name that is no text")
    found = m.names.find(module, name)
    if m.repeated is _NOBODY and m.names.makes_unchanging(found):
        m.repeated = found
    m.stack.append(found)


def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    if type(args) is not tuple:
        raise FormatError("a call whose arguments are no tuple")
    m.stack[-1] = m.names.call(m.stack[-1], args)  # pyright: ignore[reportUnknownArgumentType]


def _new_object_with_keywords(m: Machine) -> None:
    keywords, args = m.stack.pop(), m.stack.pop()
    if type(args) is not tuple or type(keywords) is not dict:
        raise FormatError("a call whose arguments are no tuple and no dict")
    m.stack[-1] = m.names.call(m.stack[-1], args, keywords)  # pyright: ignore[reportUnknownArgumentType]


def _instance(m: Machine) -> None:
    cls = _name(m)
    m.stack, args = m.marks.pop(), m.stack
    m.stack.append(m.names.call(cls, args))


def _object(m: Machine) -> None:
    cls, *args = m.marked()
    m.stack.append(m.names.call(cls, args))


def _build(m: Machine) -> None:
    state = m.stack.pop()
    m.names.build(m.stack[-1], state)
    if m.repeated not in (_NOBODY, _NEVER) and m.names.never_changes(m.stack[-1]):
        m.built()


def _single(m: Machine) -> None:
    m.stack[-1] = (m.stack[-1],)


def _triple(m: Machine) -> None:
    last, middle = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], middle, last)


def _text_get(m: Machine) -> None:
    m.stack.append(m.memo[int(m.line())])


def _put(key: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        m.put(key(m))

    return op


def _short_put(m: Machine) -> None:
    m.put(m.data[m.at])
    m.at += 1


def _long_put(m: Machine) -> None:
    m.put(m.number(_UINT))


def _small_number(m: Machine) -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _short_text(m: Machine) -> None:
    m.stack.append(_text(m, m.number(_UINT)))


def _pair(m: Machine) -> None:
    last = m.stack.pop()
    m.stack[-1] = (m.stack[-1], last)


def _pushes(value: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        made = value(m)  # which may put another stack in place
        m.stack.append(made)

    return op


_NEW_WITH_ATTRIBUTES = b"\x81\x94}\x94("  # behind an empty tuple: how an object with attributes begins


def _empty_tuple(m: Machine) -> None:
    """Push an empty tuple; where an object with attributes begins, do all five opcodes behind it too: metadata has millions."""
    at = m.at
    if m.data[at : at + 5] != _NEW_WITH_ATTRIBUTES:
        m.stack.append(())
        return
    made = m.stack[-1] = m.names.call(m.stack[-1], ())
    m.memoize(made)
    held = m.names.new_dict(made)
    m.stack.append(held)
    m.memoize(held)
    _mark(m)
    m.at = at + 5


def _plain(value: Callable[[], Any]) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        m.stack.append(value())

    return op


def _new_dict(m: Machine) -> None:
    m.stack.append(m.names.new_dict(m.stack[-1] if m.stack else None))


def _skip(count: int) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        m.bytes(count)

    return op


def _frame(m: Machine) -> None:
    m.number(_LONG)
    forget_behind(m.data, m.at)


def _pop_mark(m: Machine) -> None:
    m.marked()


def _out_of_band(m: Machine) -> None:
    raise FormatError("buffers outside of the pickle, which no checkpoint has")


_TABLE: dict[bytes, Callable[[Machine], None]] = {
    b"(": _mark, b"0": _pop, b"1": _pop_mark, b"2": _pushes(lambda m: m.stack[-1]),
    b"N": _plain(lambda: None), b"\x88": _plain(lambda: True), b"\x89": _plain(lambda: False),
    b"I": _pushes(_integer_line), b"L": _pushes(_long_line), b"J": _pushes(lambda m: m.number(_INT)),
    b"K": _small_number, b"M": _pushes(lambda m: m.number(_SHORT)),
    b"\x8a": _pushes(lambda m: _long(m, m.number(_BYTE))), b"\x8b": _pushes(lambda m: _long(m, m.number(_INT))),
    b"F": _pushes(lambda m: float(m.line())), b"G": _pushes(lambda m: m.number(_DOUBLE)),
    b"S": _pushes(_string_line), b"V": _pushes(lambda m: m.line().decode("raw-unicode-escape")),
    b"U": _pushes(lambda m: m.bytes(m.number(_BYTE)).decode("latin1")),
    b"T": _pushes(lambda m: m.bytes(m.number(_INT)).decode("latin1")),
    b"\x8c": _pushes(lambda m: _text(m, m.number(_BYTE))), b"X": _short_text,
    b"\x8d": _pushes(lambda m: _text(m, m.number(_LONG))),
    b"C": _pushes(lambda m: m.bytes(m.number(_BYTE))), b"B": _pushes(lambda m: m.bytes(m.number(_UINT))),
    b"\x8e": _pushes(lambda m: m.bytes(m.number(_LONG))), b"\x96": _pushes(lambda m: m.bytes(m.number(_LONG))),
    b"]": _plain(list), b"}": _new_dict, b")": _empty_tuple, b"\x8f": _plain(set),
    b"l": _pushes(Machine.marked), b"t": _pushes(lambda m: tuple(m.marked())),
    b"d": _pushes(lambda m: _dict_of(m.marked())), b"\x91": _pushes(lambda m: frozenset(map(check_key, m.marked()))),
    b"\x85": _single, b"\x86": _pair, b"\x87": _triple,
    b"a": _append, b"e": _appends, b"s": _set_item, b"u": _set_items, b"\x90": _add_items,
    b"c": _pushes(_name), b"\x93": _stack_name, b"i": _instance, b"o": _object, b"b": _build,
    b"R": _reduce, b"\x81": _reduce, b"\x92": _new_object_with_keywords,
    b"P": _pushes(lambda m: m.names.refer(m.line().decode("ascii"))), b"Q": _pushes(lambda m: m.names.refer(m.stack.pop())),
    b"g": _text_get, b"p": _put(lambda m: int(m.line())), b"q": _short_put, b"r": _long_put,
    b"\x80": _skip(1), b"\x95": _frame, b"\x97": _out_of_band, b"\x98": _out_of_band,
}  # fmt: skip
_OPCODES = [_TABLE.get(bytes([code]), _unknown) for code in range(256)]
