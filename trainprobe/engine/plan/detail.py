"""How much of one name is recorded: the answer of a plan to a tap's question."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Summary: TypeAlias = Literal["statistics", "checksum", "md5", "both", "statistics_and_md5"]


@dataclass(frozen=True, slots=True)
class Slice:
    """Indices begin..end (end excluded, None: to the last) of one dimension, negative ones from the end.

    length: the cut is made only where the dimension has this length (None: whatever it has).
    """

    dim: int
    begin: int
    end: int | None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Detail:
    """What is recorded of a name. slice: the cuts that are stored, () for the whole tensor."""

    task: Literal["statistics", "tensor"]
    summary: Summary
    statistics: tuple[str, ...]
    slice: tuple[Slice, ...] = ()

    @property
    def wants_statistics(self) -> bool:
        """Whether partial sums are needed."""
        return self.summary in {"statistics", "both", "statistics_and_md5"} and bool(self.statistics)

    @property
    def wants_checksum(self) -> bool:
        """Whether the 64-bit fingerprint is needed."""
        return self.summary in {"checksum", "both"}

    @property
    def wants_crc32(self) -> bool:
        """Whether the CRC-32 of the bytes is needed, which existing files call md5."""
        return self.summary in {"md5", "statistics_and_md5"}

    @property
    def wants_tensor(self) -> bool:
        """Whether the values themselves are stored."""
        return self.task == "tensor"

    def index(self, shape: Sequence[int]) -> tuple[builtins.slice, ...] | None:
        """Return the index that cuts out of a tensor of this shape what is stored, or None for the whole tensor."""
        index = [builtins.slice(None)] * len(shape)
        whole = True
        for cut in self.slice:
            if -len(shape) <= cut.dim < len(shape) and cut.length in (None, shape[cut.dim]):
                index[cut.dim] = builtins.slice(cut.begin, cut.end)
                whole = False
        return None if whole else tuple(index)

    def changed(
        self,
        *,
        task: Literal["statistics", "tensor"] | None = None,
        summary: Summary | None = None,
        statistics: tuple[str, ...] | None = None,
        slice: tuple[Slice, ...] | None = None,
    ) -> Detail:
        """Return this detail with what is given (not None) in place of what it had."""
        return Detail(
            self.task if task is None else task,
            self.summary if summary is None else summary,
            self.statistics if statistics is None else statistics,
            self.slice if slice is None else slice,
        )
