"""What a reader leaves out of a file, because it is damaged, is told: the command says it, and is not "healthy"."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from trainprobe.errors import FormatError, ProbeError

# what reading a damaged file raises, whatever the reader
DAMAGED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_told: list[dict[str, None]] = []
_MOST = 20  # sentences that are told one by one


@contextmanager
def told() -> Generator[dict[str, None]]:
    """Collect in here, as keys, the sentences of what is left out; outside of it a reader raises them."""
    _told.append({})
    try:
        yield _told[-1]
    finally:
        _told.pop()


@contextmanager
def damaged_as(what: str) -> Generator[None]:
    """Turn what a damaged file makes its reader raise in here into a FormatError. what: the file, and what it is read as."""
    try:
        yield
    except DAMAGED as error:
        if isinstance(error, ProbeError):
            raise
        raise FormatError(f"{what} is damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from error


def tell(sentence: str) -> None:
    """Tell what is not in a file, where anybody collects what is left out."""
    if _told:
        _told[-1][sentence if len(_told[-1]) < _MOST else "further parts are left out"] = None


def leave_out(sentence: str) -> None:
    """Tell that a part of a file is left out. Raises FormatError where nobody collects what is."""
    if not _told:
        raise FormatError(sentence)
    tell(sentence)
