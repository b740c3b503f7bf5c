"""What the writers of a reel share: the columns of its numbers as text, and what it has in common with the steps before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from trainprobe.compiled import native
from trainprobe.engine.dumps.numbers_text import table_text
from trainprobe.engine.records import Call, Opaque, Reel, Value


class Pattern:
    """Stands for all steps whose calls are alike: one that is written like them differs in nothing but its numbers.

    calls: of the first of these steps. logged: what the record log makes of them, once it did (see `record_log.Logged`).
    """

    __slots__ = ("calls", "logged")

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.logged: Any = None


class Plain:
    """The numbers of a reel whose rows all have elements that are finite, and no partials but those of the basic statistics.

    counts, zeros: how many elements each row has, and how many are zero, as numbers with commas between. used: of the columns,
    whether a number is not 0.
    """

    COLUMNS = ("sum", "sumsq", "min", "max", "mean", "norm")

    __slots__ = ("_table", "_texts", "counts", "used", "zeros")

    def __init__(self, table: bytes, used: int, counts: bytes, zeros: bytes) -> None:
        self._table = np.frombuffer(table).reshape(len(self.COLUMNS), -1)
        self._texts: dict[str, bytes] = {}
        self.counts = counts
        self.zeros = zeros
        self.used = {name: bool(used >> i & 1) for i, name in enumerate(self.COLUMNS)}

    def texts(self, first: str, last: str) -> dict[str, bytes]:
        """Return columns, at least those from the first to the last, as numbers with commas between."""
        names = self.COLUMNS[self.COLUMNS.index(first) : self.COLUMNS.index(last) + 1]
        new = [name for name in names if name not in self._texts]
        if new:
            start, end = self.COLUMNS.index(new[0]), self.COLUMNS.index(new[-1]) + 1
            self._texts.update(zip(self.COLUMNS[start:end], table_text(self._table[start:end]), strict=True))
        return self._texts


class Shared:
    """What is worked out once for all writers of a reel."""

    __slots__ = ("_asked", "_plain", "calls", "partials", "pattern")

    def __init__(self, reel: Reel) -> None:
        self.calls = reel.calls
        self.partials = reel.partials
        self.pattern = Pattern(reel.calls)
        self._plain: Plain | None = None
        self._asked = native is None or type(reel) is not Reel  # one that was read has no partials of its own

    @property
    def plain(self) -> Plain | None:
        """Return the numbers, or None where they are not plain or the compiled parts are not there."""
        if not self._asked:
            self._asked = True
            assert native is not None
            found = native.plain_table(np.asarray(self.partials, np.float64).tobytes())
            self._plain = None if found is None else Plain(*found)
        return self._plain


def shared(reel: Reel) -> Shared:
    """Return what the writers of a reel share."""
    found: Shared | None = reel.shared
    if found is None or found.calls is not reel.calls or found.partials is not reel.partials:
        found = reel.shared = Shared(reel)
    return found


def pattern_of(reel: Reel, before: Pattern | None = None) -> Pattern:
    """Return the pattern of a reel: that of a step before where it is like it, as far as the compiled parts can tell."""
    own = shared(reel)
    if native is None or before is None or own.pattern is before:
        return own.pattern
    if native.calls_alike(before.calls, reel.calls, Opaque):
        own.pattern = before
    return own.pattern


class Steady:
    """Has steps that are alike share one set of calls: what a step was made of is then freed at once and where it was made.

    Each step's own objects would wait for the writer otherwise, and pass from the cache of one core to that of the other.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], tuple[Pattern, list[Value]]] = {}  # by the programs that wanted the step

    def settle(self, reel: Reel) -> None:
        """Give a reel the calls and values of the step before where the two differ in nothing but numbers."""
        programs = tuple(reel.programs)
        last, values = self._last.get(programs, (None, None))
        pattern = pattern_of(reel, last)
        if values is None or pattern is not last:
            self._last[programs] = pattern, reel.values
        else:
            own = shared(reel)
            own.calls = reel.calls = pattern.calls
            reel.values = values


def all_compiled(calls: Iterable[Call]) -> bool:
    """Tell whether all calls are those of the compiled parts."""
    return native is not None and set(map(type, calls)) <= {native.Call}
