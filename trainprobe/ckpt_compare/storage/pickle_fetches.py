"""Which of its memoized values a pickle fetches again, found by walking over its opcodes without running them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

_STOP = ord(".")
_BYTE, _INT, _UINT, _LONG = (struct.Struct(f"<{c}") for c in "BiIQ")


def _counted(kind: struct.Struct) -> Callable[[Any, int], int]:
    def skip(data: Any, at: int) -> int:
        return at + kind.size + max(0, kind.unpack_from(data, at)[0])

    return skip


def _lines(count: int) -> Callable[[Any, int], int]:
    def skip(data: Any, at: int) -> int:
        for _ in range(count):
            at = data.find(b"\n", at) + 1
            if not at:
                raise ValueError("a line has no end")
        return at

    return skip


# opcode → the byte behind its argument, given the byte behind the opcode
_SKIPS: dict[int, Callable[[Any, int], int]] = {
    **{code: _lines(1) for code in b"ILFSVPgp"}, **{code: _lines(2) for code in b"ci"},
    **{code: _counted(_BYTE) for code in b"U\x8cC\x8a"}, **{code: _counted(_UINT) for code in b"XB"},
    **{code: _counted(_INT) for code in b"T\x8b"}, **{code: _counted(_LONG) for code in b"\x8d\x8e\x96"},
}  # fmt: skip
_WIDTHS = [{**dict.fromkeys(b"Khq\x80", 1), **{77: 2}, **dict.fromkeys(b"Jjr", 4), **dict.fromkeys(b"G\x95", 8)}.get(c, 0)
           for c in range(256)]  # fmt: skip
_BARE = b"(012N\x88\x89])}\x8fltd\x91\x85\x86\x87aesu\x90\x93obR\x81\x92Q\x94\x97\x98."  # opcodes without an argument
_KNOWN = {*_BARE, *_SKIPS, *(code for code in range(256) if _WIDTHS[code])}
# bytes to the next opcode; 0: see _SKIPS; −1: no opcode
_NEXT = [-1 if c not in _KNOWN else 0 if c in _SKIPS else 1 + _WIDTHS[c] for c in range(256)]


def fetched(data: Any, at: int = 0) -> set[int]:
    """Return the memo's indices that the pickle at a byte ever fetches; of a damaged one those before the damage."""
    found: set[int] = set()
    after, end = _NEXT, len(data)
    try:
        while at < end:
            code = data[at]
            if code in b"hjg.":
                if code == _STOP:
                    break
                found.add(_fetched_index(data, code, at + 1))
            width = after[code]
            if width < 0:
                break
            at = at + width if width else _SKIPS[code](data, at + 1)
    except (ValueError, IndexError, struct.error):
        pass  # the machine meets the same damage, and says so
    return found


def _fetched_index(data: Any, code: int, at: int) -> int:
    if code == 103:  # g: a line
        return int(data[at : max(at, data.find(b"\n", at))])
    return data[at] if code == 104 else _UINT.unpack_from(data, at)[0]
