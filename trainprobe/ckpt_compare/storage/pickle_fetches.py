"""Which of its memoized values a pickle may fetch again, found without running it.

Every byte that could be a fetch is taken for one: a value that nobody fetches is then kept at times, and none is missed.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from trainprobe.ckpt_compare.storage.mapped import forget_between

_SHORT_GET, _LONG_GET = b"hj"
_AT_ONCE = 1 << 24  # bytes that are looked at together
_MEMOIZING = np.zeros(256, bool)
_MEMOIZING[list(b"\x94pqr")] = True
_TEXT_GET = re.compile(rb"g(\d{1,18})\n")
_LONGEST_FETCH = 20


def perhaps_fetched(data: Any) -> bytearray:
    """Return a byte for each index of the memo of a pickle that is all of the data: 1 where it may be fetched.

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
