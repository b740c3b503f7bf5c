"""Keys of dicts and members of sets in a pickle: looked at before they are hashed."""

from __future__ import annotations

from typing import Any

from trainprobe.errors import FormatError

LARGEST_KEY = 1000  # values inside one key of a dict or member of a set


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
