"""Numbers of things in words, the same in every message: "1 rank", "4,096 ranks", "rank 3", "steps 0–3, 7"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def plural(number: int, noun: str) -> str:
    """Return the noun for so many of it: "rank", "ranks"."""
    return noun if number == 1 else f"{noun}es" if noun.endswith(("ch", "sh", "ss")) else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return "1 rank", "4,096 ranks"."""
    return f"{number:,} {plural(number, noun)}"


def numbered(noun: str, numbers: Collection[int]) -> str:
    """Return "rank 3", "ranks 0–3, 7"; the numbers come in any order."""
    return f"{plural(len(numbers), noun)} {spans(numbers)}"


def briefly(noun: str, numbers: Collection[int], shown: int = 8) -> str:
    """Return what `numbered` does, of many stretches the first: "ranks 0, 2, 4, … (512 ranks)"."""
    parts = spans(numbers).split(", ")
    rest = f", … ({counted(len(numbers), noun)})" if len(parts) > shown else ""
    return f"{plural(len(numbers), noun)} {', '.join(parts[:shown])}{rest}"


def and_more(names: Sequence[str], of: int | None = None, shown: int = 1) -> str:
    """Name the first of several and how many more there are: "a.weight", "a.weight and 3 more", with `of` "… (of 28)"."""
    rest = len(names) - shown
    more = f" and {rest} more" if rest > 0 else ""
    return f"{', '.join(names[:shown])}{more}" + (f" (of {of})" if of is not None and len(names) > 1 else "")


def spans(numbers: Iterable[int]) -> str:
    """Write numbers briefly, ascending and each once: "0–3, 7"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}{'–' if len(p) > 2 else ', '}{p[-1]}" for p in parts)
