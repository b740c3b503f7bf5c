"""What `watch` gives where the process has no file descriptor left to begin with: the training goes on, unobserved."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from trainprobe.engine.core.log_lines import say

_NO_MORE = (errno.EMFILE, errno.ENFILE)


def lacks_descriptors(fault: BaseException | None) -> bool:
    """Return whether a fault, or one that led to it, is that no file can be opened any more."""
    if fault is None:
        return False
    own = isinstance(fault, OSError) and fault.errno in _NO_MORE
    return own or lacks_descriptors(fault.__cause__ or fault.__context__)


class Unobserved:
    """Stands for a probe: its steps are steps of the training alone, and every other method does nothing."""

    findings: tuple[()] = ()

    def step(self, number: int | None = None) -> AbstractContextManager[Unobserved]:
        """Let the step run."""
        return nullcontext(self)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def unobserved() -> Unobserved:
    """Say that nothing is watched, and why."""
    say(
        "nothing is watched, the training goes on unobserved: the process has no file descriptor left (`ulimit -n` shows how "
        "many it may have)",
        severity="error",
    )
    return Unobserved()


@contextmanager
def watch(*args: Any, **kwargs: Any) -> Generator[Unobserved]:
    """Take what `trainprobe.watch` takes, and watch nothing."""
    yield unobserved()
