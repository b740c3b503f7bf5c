"""Changes of a plan while the run goes on, from a file: rank 0 looks at it, and every rank learns of it at the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.storage.safe_files import SMALL, read_bounded
from trainprobe.errors import FormatError, PlanError

Payload = npt.NDArray[np.uint64]
FILE = "control.yaml"


class ControlFile:
    """Looks at each `every`-th step whether `control.yaml` in a folder has changed. All ranks must call `look` at each step.

    What is no regular file, is a link, or has more than 64 KiB is taken for no file.

    gather: brings every rank's message to every rank: one small collective at a step at which the file is looked at.
    """

    def __init__(self, folder: Path, every: int, rank: int, gather: Callable[[Sequence[int] | Payload], list[Payload]]) -> None:
        self._path = folder / FILE
        self._every = every
        self._rank = rank
        self._gather = gather
        self._known: bytes = b""

    def look(self, step: int) -> Mapping[str, Any] | None:
        """Return what the file says when it is new, the same on every rank; PlanError, on every rank, when it is no plan.

        A file that stands there before the run begins counts as new at the first look.
        """
        if step % self._every:
            return None
        payload = self._gather(_words(self._new()))[0]
        text = _text(payload)
        if not text:
            return None
        try:
            return read_plan_file(self._path, text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise PlanError(f"{self._path} is not UTF-8 text ({error}): the plan stays as it is") from error

    def _new(self) -> bytes:
        """Return the bytes of the file if they have changed since they were last shared; nothing on ranks other than 0."""
        if self._rank:
            return b""
        try:
            text = read_bounded(self._path, SMALL)
        except (OSError, FormatError):
            return b""
        if text == self._known:
            return b""
        self._known = text
        return text


def _words(text: bytes) -> Payload:
    padded = text + b"\0" * (-len(text) % 8)
    return np.concatenate([np.array([len(text)], np.uint64), np.frombuffer(padded, np.uint64)])


def _text(words: Payload) -> bytes:
    return words[1:].tobytes()[: int(words[0])]
