"""Which of its memoized values a pickle fetches again, found without running it.

`fetched` walks over the opcodes and stops where the pickle ends. Where that is known, `perhaps_fetched` takes every byte for a
fetch that could be one, ten times as fast: a value that nobody fetches is then kept at times, and none is missed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from trainprobe.ckpt_compare.storage.mapped import forget_behind, forget_between

_STOP, _SHORT_GET, _LONG_GET, _FRAME = b".hj\x95"
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


def fetched(data: Any, at: int = 0) -> bytearray:
    """Return a byte for each index of the memo: 1 where the pickle at a byte fetches it; of a damaged one, before the damage.

    No pickle memoizes more values than it has bytes: an index beyond that is left out.
    """
    found, after, end = bytearray(256), _NEXT, len(data)
    try:
        while at < end:
            code = data[at]
            if code == _SHORT_GET:
                found[data[at + 1]] = 1
                at += 2
                continue
            if code == _FRAME:
                forget_behind(data, at)
            elif code in b"jg.":
                if code == _STOP:
                    break
                index = _UINT.unpack_from(data, at + 1)[0] if code == _LONG_GET else int(_line(data, at + 1))
                if 0 <= index <= end:
                    if index >= len(found):
                        found.extend(bytes(index + 1 - len(found)))
                    found[index] = 1
            width = after[code]
            if width > 0:
                at += width
            elif width < 0:
                break
            else:
                at = _SKIPS[code](data, at + 1)
    except (ValueError, IndexError, struct.error):
        pass  # the machine meets the same damage, and says so
    return found


_AT_ONCE = 1 << 24  # bytes that are looked at together
_MEMOIZING = np.zeros(256, bool)
_MEMOIZING[list(b"\x94pqr")] = True
_TEXT_GET = re.compile(rb"g(\d{1,18})\n")
_LONGEST_FETCH = 20


def perhaps_fetched(data: Any) -> bytearray:
    """Return what `fetched` does for a pickle that is all of the data, and 1 for some values more.

    It has a byte for as many values as the pickle can memoize, if it counts them; an index beyond these says nothing.
    """
    end = len(data)
    counted = 1
    for start in range(0, end, _AT_ONCE):
        size = min(end - start, _AT_ONCE)
        counted += int(np.count_nonzero(_MEMOIZING[np.frombuffer(data, np.uint8, size, start)]))
        forget_between(data, start, start + size)
    found = np.zeros(counted, np.uint8)
    for start in range(0, end, _AT_ONCE):
        some = np.frombuffer(data, np.uint8, min(end - start, _AT_ONCE + _LONGEST_FETCH), start)
        at = np.flatnonzero(some[:-4] == _LONG_GET)
        long = [some[at + byte].astype(np.int64) << 8 * (byte - 1) for byte in (1, 2, 3, 4)]
        short = some[np.flatnonzero(some[:-1] == _SHORT_GET) + 1]
        text = np.array([int(match[1]) for match in _TEXT_GET.finditer(data, start, start + len(some))], np.int64)
        indices = np.concatenate([long[0] | long[1] | long[2] | long[3], short, text])
        found[indices[indices < counted]] = 1
        forget_between(data, start, start + len(some))
    return bytearray(found)


def _line(data: Any, at: int) -> bytes:
    return data[at : max(at, data.find(b"\n", at))]
