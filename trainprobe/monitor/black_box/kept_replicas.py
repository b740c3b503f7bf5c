"""Finds, in a dump that kept tensors, the ones that differ between ranks, and says in which element and bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.stats.flipped import Flip, flips, odd_one_out
from trainprobe.engine.storage.dumps.layout import find_ranks, find_steps
from trainprobe.engine.storage.dumps.tensor_store import TensorStore
from trainprobe.errors import FormatError


@dataclass(frozen=True, slots=True)
class KeptDifference:
    """One kept tensor that is not the same bits on every rank. count: elements that differ. flips: the first of them.

    rank: the one that stands alone where most agree, else the higher one. against: the rank it is compared with.
    """

    step: int
    name: str
    rank: int
    against: int
    count: int
    flips: Sequence[Flip]

    def __str__(self) -> str:
        elements = "1 element differs" if self.count == 1 else f"{self.count} elements differ"
        return f"step {self.step}, {self.name}: {elements} on rank {self.rank} from rank {self.against}; {self.flips[0]}"


def kept_differences(folder: Path) -> Iterator[KeptDifference]:
    """Yield the tensors of a run's or a step's folder that differ between ranks which kept them, in order of execution.

    Raises FormatError where no step holds tensors of two ranks. Tensors of different shapes (shards) are no replicas.
    """
    steps = find_steps(folder) or {_number(folder): folder}
    compared = False
    for step, path in sorted(steps.items()):
        stores = {rank: TensorStore(place) for rank, place in sorted(find_ranks(path).items())}
        names = {rank: set(store.names()) for rank, store in stores.items()}
        for name in dict.fromkeys(name for store in stores.values() for name in store.names()):
            ranks = [rank for rank in stores if name in names[rank]]
            if len(ranks) > 1:
                compared = True
                yield from _compare(step, name, ranks, [stores[rank].array(name) for rank in ranks])
    if not compared:
        raise FormatError(
            f"no step under {folder} holds tensors of two ranks: have them kept with `task: tensor` or `tensors: [...]`"
        )


def _compare(step: int, name: str, ranks: list[int], arrays: list[npt.NDArray[Any]]) -> Iterator[KeptDifference]:
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        return
    minority = odd_one_out(arrays)
    usual = next(i for i in range(len(ranks)) if i not in minority) if minority else 0
    for i in minority or range(1, len(ranks)):
        count, found = flips(*_as_kept(arrays[usual], arrays[i]))
        if count:
            yield KeptDifference(step, name, ranks[i], ranks[usual], count, found)


def _as_kept(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], str | None]:
    """Undo the widening of bfloat16, whose lower half is empty: bits are numbered as in the tensor's own dtype."""
    if a.dtype == np.float32:
        wide = [np.ascontiguousarray(x).view(np.uint32) for x in (a, b)]
        if all(not (x & 0xFFFF).any() for x in wide) and any(x.any() for x in wide):
            return (wide[0] >> 16).astype(np.uint16), (wide[1] >> 16).astype(np.uint16), "bfloat16"
    return a, b, None


def _number(folder: Path) -> int:
    digits = folder.name.removeprefix("step")
    return int(digits) if digits.isdigit() else 0
