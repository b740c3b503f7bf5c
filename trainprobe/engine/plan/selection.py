"""Which steps, ranks, micro-batches and names a plan means: parsed once, then asked many times.

Numbers are written `10`, `"100-110"` (both ends belong to it), `"100-"` (from 100 on), `"every 50"`,
`"every 50 from 100 to 1000"` and `"all"`; several in a list or, in one text, between commas.

Names are dotted. A pattern is a glob over the whole name, in which `*` stands for any text without a dot, `**` for any
text, `?` for one character other than a dot and `[0-9]` for one of a set; or a regular expression after `re:`, found
anywhere in the name. A leading `!` excludes. A name is selected when some pattern matches it, and no excluding one does;
where only excluding patterns are given, everything else is selected.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

_SPAN = re.compile(r"(?P<first>\d+)(?:\s*(?P<dash>-)\s*(?P<last>\d+)?)?")
_EVERY = re.compile(r"every\s+(?P<stride>\d+)(?:\s+from\s+(?P<first>\d+))?(?:\s+to\s+(?P<last>\d+))?")
_HOW = 'write a number, "100-110", "100-", "every 50", "every 50 from 100 to 1000" or "all"'
LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """An arithmetic progression first, first + stride, … that ends at or before `last` (None: it never ends)."""

    first: int
    last: int | None
    stride: int
    text: str

    def __contains__(self, number: int) -> bool:
        inside = number >= self.first and (self.last is None or number <= self.last)
        return inside and (number - self.first) % self.stride == 0

    def end(self) -> int | None:
        """Return the last number that belongs to the span, or None when it never ends."""
        return None if self.last is None else self.last - (self.last - self.first) % self.stride

    def meets(self, low: int, high: int) -> bool:
        """Tell whether some number of the span lies in low..high, both ends included."""
        start = max(low, self.first)
        start += -(start - self.first) % self.stride
        return start <= high and (self.last is None or start <= self.last)


@dataclass(frozen=True)
class Steps:
    """A set of non-negative whole numbers, possibly endless: the union of its spans."""

    spans: tuple[Span, ...]

    def __contains__(self, number: int) -> bool:
        for span in self.spans:  # noqa: SIM110  (asked in each step)
            if number in span:
                return True
        return False

    def last(self) -> int | None:
        """Return the largest number, or None when the set never ends."""
        ends = [span.end() for span in self.spans]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == len(ends) else None

    def pending(self, first_seen: int, last_seen: int) -> tuple[str, ...]:
        """Return, as they were written, the pieces of which no number lies in first_seen..last_seen."""
        return tuple(span.text for span in self.spans if not span.meets(first_seen, last_seen))


def parse_steps(pieces: object) -> Steps:
    """Read a number, a text or a list of them as a set of numbers; ValueError says what is wrong with which piece."""
    several = cast("list[object]", list(pieces)) if isinstance(pieces, (list, tuple)) else [pieces]
    if not several:
        raise ValueError('the list is empty and would select nothing: leave the key out, or write "all"')
    spans: list[Span] = []
    for piece in several:
        parts = piece.split(",") if isinstance(piece, str) else [piece]
        spans.extend(_span(part) for part in parts)
    return Steps(tuple(spans))


def _span(piece: object) -> Span:
    if isinstance(piece, bool) or not isinstance(piece, (int, str)):
        raise ValueError(f"{piece!r} is not a number or a range: {_HOW}")
    text = str(piece).strip()
    if text == "all":
        return Span(0, None, 1, text)
    if match := _SPAN.fullmatch(text):
        first = int(match["first"])
        last = first if match["dash"] is None else match["last"] and int(match["last"])
        return _checked(Span(first, None if last is None else int(last), 1, text))
    if match := _EVERY.fullmatch(text):
        last = match["last"]
        return _checked(Span(int(match["first"] or 0), None if last is None else int(last), int(match["stride"]), text))
    raise ValueError(f"{piece!r} is not a number or a range: {_HOW}")


def _checked(span: Span) -> Span:
    if span.stride < 1:
        raise ValueError(f"{span.text!r} repeats every 0: the distance must be at least 1")
    if span.last is not None and span.last < span.first:
        raise ValueError(f"{span.text!r} ends at {span.last}, before it begins at {span.first}: swap the two numbers")
    if max(span.first, span.last or 0, span.stride) > LARGEST:
        raise ValueError(f"{span.text!r} is larger than any step can be ({LARGEST})")
    return span


@dataclass(frozen=True)
class Names:
    """A set of dotted names, given by patterns (see the module text)."""

    patterns: tuple[str, ...]

    @cached_property
    def _wanted(self) -> tuple[re.Pattern[str], ...]:
        return tuple(compile_pattern(p) for p in self.patterns if not p.startswith("!"))

    @cached_property
    def _excluded(self) -> tuple[re.Pattern[str], ...]:
        return tuple(compile_pattern(p[1:]) for p in self.patterns if p.startswith("!"))

    @cached_property
    def everything(self) -> bool:
        """Whether every name belongs to the set, known without asking for each."""
        return not self._excluded and "**" in self.patterns

    def __contains__(self, name: str) -> bool:
        if self.everything:
            return True
        if any(p.search(name) for p in self._excluded):
            return False
        return any(p.search(name) for p in self._wanted) or (not self._wanted and bool(self._excluded))

    def unmatched(self, names: Iterable[str]) -> list[tuple[str, str | None]]:
        """Return each pattern that matches none of `names`, with the nearest name or None."""
        known = list(names)
        idle = [
            p for p in self.patterns if p != "**" and not any(compile_pattern(p.removeprefix("!")).search(n) for n in known)
        ]
        return [(p, _nearest(p, known)) for p in idle]


def parse_names(patterns: Sequence[str]) -> Names:
    """Compile patterns; ValueError says which one cannot be used and why."""
    for pattern in patterns:
        if not pattern.removeprefix("!"):
            raise ValueError(f"{pattern!r} is an empty pattern: write ** for every name")
        try:
            compile_pattern(pattern.removeprefix("!"))
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return Names(tuple(patterns))


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Turn one glob or `re:` pattern, without its `!`, into a regular expression to be used with `search`."""
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    pieces = re.findall(r"\*\*|\[!?[^\]]+\]|.", pattern, flags=re.DOTALL)
    return re.compile("".join(["\\A", *map(_piece, pieces), "\\Z"]), flags=re.DOTALL)


def _piece(piece: str) -> str:
    fixed = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    if piece in fixed:
        return fixed[piece]
    if len(piece) == 1:
        return re.escape(piece)
    inside = piece[1:-1]
    mark = "^" if inside.startswith("!") and len(inside) > 1 else ""
    return "[" + mark + re.sub(r"([\\\[\]^&|~])", r"\\\1", inside[len(mark) :]) + "]"


def _nearest(pattern: str, names: Sequence[str]) -> str | None:
    bare = re.sub(r"^!?(re:)?|[*?^$\\]", "", pattern)
    near = difflib.get_close_matches(bare, names, n=1, cutoff=0.4)
    return near[0] if near else None
