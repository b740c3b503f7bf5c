"""Rows of names and values, as CSV and JSON logs have them: which number is the step, and what is a scalar."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

# what counts steps, the finest first; epochs where a row has nothing else
STEPS = (
    "step",
    "global_step",
    "_step",
    "trainer/global_step",
    "train/global_step",
    "iteration",
    "iter",
    "num_updates",
    "epoch",
)
MOST = 1 << 53  # a larger number is no step
_DEPTH = 4  # of dictionaries within a row
_RANKS = ("rank", "global_rank")  # which process wrote a row, where several write to one file


def step_of(row: Mapping[str, Any]) -> int | None:
    """Return the step that a row tells, None where it tells none."""
    for name in STEPS:
        number = number_of(row.get(name))
        if number is not None and math.isfinite(number) and 0 <= number < MOST:
            return int(number)
    return None


def numbers_of(row: Mapping[str, Any]) -> Iterator[tuple[int, str, float]]:
    """Yield (step, name, number) of a row; nothing of one that tells no step. A rank that it tells stands before the names."""
    step = step_of(row)
    rank = next((row[name] for name in _RANKS if str(row.get(name)).isdecimal()), None)
    if step is not None:
        for name, number in scalars_of(row, "" if rank is None else f"rank{rank}/"):
            if name.rpartition("/")[2] not in _RANKS:
                yield step, name, number


def scalars_of(row: Mapping[str, Any], above: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row but for those that count steps; of dictionaries in it as `outer/inner`."""
    for name, value in row.items():
        if isinstance(value, Mapping) and depth:
            yield from scalars_of(value, f"{above}{name}/", depth - 1)
        elif f"{above}{name}" not in STEPS and (number := number_of(value)) is not None:
            yield f"{above}{name}", number


def number_of(value: Any) -> float | None:
    """Return a number, also of a text that is one; None for anything else, truth values too."""
    if isinstance(value, (bool, type(None))) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
