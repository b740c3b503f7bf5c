"""What a case of the bench states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Trial:
    """What a preflight is given; `options` are further arguments of it."""

    loss: Callable[[Any, Any], Any]
    model: Any
    batch: Any
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A fault: `make(True)` has it, `make(False)` is its healthy twin.

    broken: the property that must be named first. place: what the sentence must contain, if anything.
    """

    name: str
    broken: str
    make: Callable[[bool], Trial]
    place: str = ""
