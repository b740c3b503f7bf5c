"""Brings a few numbers of every rank to every rank: the one collective that the audit issues, at the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Payload = npt.NDArray[np.uint64]
_SLACK = 64  # words that the room for a message is larger than the largest message so far


class Gathering:
    """Gathers messages of 64-bit words over all ranks. Every rank must call `gather` at the same steps.

    ranks: how many there are, asked at each call. all_gather: the framework's own, of words of one length on all ranks. All
    messages travel with the same length. It is agreed upon at the first call, and again when some rank says that it needs more.
    """

    def __init__(self, ranks: Callable[[], int], all_gather: Callable[[Payload], list[Payload]]) -> None:
        self._ranks = ranks
        self._all_gather = all_gather
        self._room = 0

    def gather(self, words: Sequence[int] | Payload) -> list[Payload]:
        """Return the message of every rank, uint64 [words of that rank], in the order of ranks; waits for all of them."""
        message = np.asarray(words, dtype=np.uint64)
        if self._ranks() == 1:
            return [message]
        if not self._room:
            self._agree(message.size)
        received = self._exchange(message)
        if max(int(row[0]) for row in received) + 1 > self._room:
            self._agree(message.size)
            received = self._exchange(message)
        return [row[1 : 1 + int(row[0])] for row in received]

    def _agree(self, need: int) -> None:
        sizes = self._all_gather(np.array([need], dtype=np.uint64))
        self._room = max(int(size[0]) for size in sizes) + 1 + _SLACK

    def _exchange(self, message: Payload) -> list[Payload]:
        sent = np.zeros(self._room, dtype=np.uint64)
        sent[0] = message.size
        fits = min(message.size, self._room - 1)
        sent[1 : 1 + fits] = message[:fits]
        return self._all_gather(sent)


def may_end_apart(*joinables: Any) -> bool:
    """Tell whether ranks may end at different steps: a model or optimizer is in torch's `Join`, for uneven inputs.

    A rank that has ended answers the collectives of these alone: any other would wait for it for ever. The answer is the same
    on every rank, and stays once the context has been left, behind which the ranks count different steps.
    """
    return any(getattr(getattr(one, "_join_config", None), "enable", False) for one in joinables)
