"""What the readers of files have to say beside what they return: warnings about a file, and values that could not be read.

A reader far down knows that a pickle names `os.system`, or that one tensor of a thousand is damaged; the checkpoint that is
built far above must carry it. `collected()` opens a list for one checkpoint, and `warn` and `fault` add to the innermost one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from trainprobe.ckpt_compare.pieces import Problem


@dataclass(slots=True)
class Remarks:
    """Sentences about one checkpoint, each once, in the order in which they were made."""

    warnings: dict[str, None] = field(default_factory=dict[str, None])
    problems: dict[Problem, None] = field(default_factory=dict[Problem, None])


_CURRENT: ContextVar[Remarks | None] = ContextVar("remarks", default=None)


@contextmanager
def collected() -> Generator[Remarks]:
    """Collect what is remarked while the block runs."""
    made = Remarks()
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def warn(sentence: str) -> None:
    """Note something about a file that its reader must know, and that costs no value."""
    current = _CURRENT.get()
    if current is not None:
        current.warnings[sentence] = None


def fault(where: str, message: str) -> None:
    """Note a value that could not be read: the checkpoint is incomplete."""
    current = _CURRENT.get()
    if current is not None:
        current.problems[Problem(where, message)] = None
