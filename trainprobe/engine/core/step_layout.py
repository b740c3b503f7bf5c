"""The layout of a step: all that its calls say apart from their numbers. Steps of a training mostly have the same.

What the monitor and the writers make of a layout is made once for the steps that share it. This is the only place where
anything about a step is remembered for the steps that follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from trainprobe.engine.compiled import native, recording
from trainprobe.engine.core.records import StepData

T = TypeVar("T")
KEPT = 16  # layouts; a training has one for each set of programs that want a step


class StepLayout:
    """Stands for all steps with the same calls, and keeps what is worked out of them."""

    __slots__ = ("_derived",)

    def __init__(self) -> None:
        self._derived: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def derived(self, owner: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned when this owner asked first; it is kept for as long as the owner lives."""
        found = self._derived.get(owner)
        if found is None:
            found = self._derived[owner] = make()
        return found


_known: dict[bytes, StepLayout] = {}


def layout_of(step_data: StepData) -> StepLayout:
    """Return the layout of a collected step: the same object for collected steps that differ in nothing but their numbers.

    The names of features and scalars belong to it as the calls do, and how many numbers a feature has, but not how many bins:
    those follow from the numbers that were counted.
    """
    found: StepLayout | None = step_data.layout
    if found is None and native is None:  # what was recorded elsewhere is only read
        found = step_data.layout = StepLayout()
    if found is None:
        key = _structure_key(step_data)
        found = step_data.layout = _known[key] = _known.pop(key, None) or StepLayout()
        while len(_known) > KEPT:
            _known.pop(next(iter(tuple(_known))), None)  # not met for longest; a copy, as another thread may be here too
    return found


def _structure_key(step_data: StepData) -> bytes:
    """Return a fingerprint of all that the calls say, 64 bytes; numbers that stand in rows are no part of it."""
    features = [(f.name, f.slot, f.call, f.micro, f.numbers.size if f.edges is None else None) for f in step_data.features]
    about = features, list(step_data.scalars), [list(stack) for stack in step_data.stacks]
    return hashlib.blake2b(recording.structure(step_data.calls) + repr(about).encode(errors="surrogatepass")).digest()
