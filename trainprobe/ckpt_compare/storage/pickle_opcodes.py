"""The opcodes of pickles, each a function of the machine that runs them."""

from __future__ import annotations

import codecs
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainprobe.ckpt_compare.storage.mapped import forget_behind
from trainprobe.ckpt_compare.storage.pickle_keys import check_key
from trainprobe.errors import FormatError

if TYPE_CHECKING:
    from trainprobe.ckpt_compare.storage.pickle_machine import Machine

LARGEST_INTEGER = 1024  # bytes of an integer
_BYTE, _SHORT, _INT, UINT, _LONG = (struct.Struct(f"<{c}") for c in "BHiIQ")
_DOUBLE = struct.Struct(">d")


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
    m.named(found)
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
    m.put(m.number(UINT))


def _small_number(m: Machine) -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _short_text(m: Machine) -> None:
    m.stack.append(_text(m, m.number(UINT)))


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
    b"C": _pushes(lambda m: m.bytes(m.number(_BYTE))), b"B": _pushes(lambda m: m.bytes(m.number(UINT))),
    b"\x8e": _pushes(lambda m: m.bytes(m.number(_LONG))), b"\x96": _pushes(lambda m: m.bytes(m.number(_LONG))),
    b"]": _plain(list), b"}": _new_dict, b")": _empty_tuple, b"\x8f": _plain(set),
    b"l": _pushes(lambda m: m.marked()), b"t": _pushes(lambda m: tuple(m.marked())),
    b"d": _pushes(lambda m: _dict_of(m.marked())), b"\x91": _pushes(lambda m: frozenset(map(check_key, m.marked()))),
    b"\x85": _single, b"\x86": _pair, b"\x87": _triple,
    b"a": _append, b"e": _appends, b"s": _set_item, b"u": _set_items, b"\x90": _add_items,
    b"c": _pushes(_name), b"\x93": _stack_name, b"i": _instance, b"o": _object, b"b": _build,
    b"R": _reduce, b"\x81": _reduce, b"\x92": _new_object_with_keywords,
    b"P": _pushes(lambda m: m.names.refer(m.line().decode("ascii"))), b"Q": _pushes(lambda m: m.names.refer(m.stack.pop())),
    b"g": _text_get, b"p": _put(lambda m: int(m.line())), b"q": _short_put, b"r": _long_put,
    b"\x80": _skip(1), b"\x95": _frame, b"\x97": _out_of_band, b"\x98": _out_of_band,
}  # fmt: skip
OPCODES = [_TABLE.get(bytes([code]), _unknown) for code in range(256)]
