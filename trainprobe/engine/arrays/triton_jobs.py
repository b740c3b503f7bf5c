"""What the Triton kernels are told of each tensor: how its elements lie, its chunks, and what the kernels are compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_reduce import REDUCED, SMALLEST_NORMAL
from trainprobe.engine.stats.partials import ASKED, CHECKSUM, CHUNK, CHUNK_INTEGERS, STATS, asked_flags

TAKEN = STATS | CHECKSUM | asked_flags(ASKED)
_ROWS, _MERGE_LEVELS = (128, 64, 64, 64), 8  # four lanes a row of a program, by the sort of a dtype; 2^this lanes merge
_LEAST, _PARTS = 4, 2048  # tiles a chunk at least, a power of two; chunks a tensor before they grow, to 256 elements a lane
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply and add would spoil the errors of sums
COLUMNS, PART = 14, len(CHUNK) + len(CHUNK_INTEGERS)  # of triton_kernels: numbers a job and a part


@dataclass(frozen=True, slots=True)
class KernelKind:
    """How a dtype is read. size: bytes. sort: see triton_kernels. tiny: the smallest normal number, 0 where there is none."""

    name: str
    size: int
    sort: int
    tiny: float


_SORTS = {
    **dict.fromkeys(("int32", "uint32", "complex32", "complex64"), 1),
    **dict.fromkeys(("float64", "complex128"), 2),
    **dict.fromkeys(("int64", "uint64"), 3),
}


def _kind(dtype: torch.dtype) -> KernelKind:
    name = str(dtype).rpartition(".")[2]
    tiny = SMALLEST_NORMAL.get(dtype.to_real() if dtype.is_complex else dtype, 0.0)
    return KernelKind(name, dtype.itemsize, _SORTS.get(name, 0), tiny)


KINDS = {dtype: _kind(dtype) for dtype in REDUCED}


@dataclass(slots=True)
class Jobs:
    """Tensors of one dtype that are reduced by one pair of launches, what the kernels are told of each (triton_kernels)."""

    addresses: list[int] = field(default_factory=list[int])
    """Of the first elements."""
    counts: list[int] = field(default_factory=list[int])
    """Elements of each."""
    rows: list[int] = field(default_factory=list[int])
    """Addresses of the rows to write."""
    strided: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Place in these lists → layout of a tensor that is not contiguous."""

    def __len__(self) -> int:
        """Return how many tensors these are."""
        return len(self.rows)

    def add(self, t: Tensor, row: int, ordered: bool = True) -> bool:
        """Add a tensor; False where the kernels cannot read it.

        row: the address of the row to write. ordered: False where the order of the elements decides nothing, as in statistics:
        a permuted tensor is then read as it lies in memory, whatever its number of dimensions.
        """
        if not t.is_contiguous():
            layout = _layout(t.shape, t.stride(), ordered)
            if layout is None:
                return False
            if layout is not _ONE_AFTER_THE_OTHER:
                self.strided[len(self.rows)] = layout
        if t.is_neg() or t.is_conj():
            self.strided.pop(len(self.rows), None)
            return False
        self.addresses.append(t.data_ptr())
        self.counts.append(t.numel())
        self.rows.append(row)
        return True

    def table(self, kind: KernelKind) -> tuple[npt.NDArray[np.int64], int]:
        """Return the columns of the jobs, int64 [14, jobs] (triton_kernels), and how many chunks they have."""
        sizes = {count: chunk_of(count, kind) for count in {*self.counts}}  # few: weights and their gradients have one size
        chunks = [sizes[count] for count in self.counts]
        own = [-(-count // chunk) for count, chunk in zip(self.counts, chunks, strict=True)]
        *firsts, blocks = accumulate(own, initial=0)
        table = np.empty((COLUMNS, len(own)), np.int64)
        table[:6] = firsts, self.addresses, self.counts, chunks, own, self.rows
        table[6:13] = _COLUMN
        table[13] = 0 if kind.sort else [0 if address % 16 else 2 for address in self.addresses]
        for place, layout in self.strided.items():
            table[6:13, place], table[13, place] = layout[:-1], _mode(self.addresses[place], layout, kind)
        return table, blocks


_ONE_AFTER_THE_OTHER = (1, 1, 1, 0, 0, 0, 0, 0)
_COLUMN = np.array(_ONE_AFTER_THE_OTHER[:-1], np.int64)[:, None]


def _layout(shape: Sequence[int], strides: Sequence[int], ordered: bool) -> tuple[int, ...] | None:
    """Return three inner sizes, four strides, and whether they count.

    None where more than four dimensions are left, or an inner one has 2^31 elements.
    """
    kept: list[tuple[int, int]] = []
    dimensions = zip(shape, strides, strict=True)
    for size, stride in dimensions if ordered else sorted(dimensions, key=itemgetter(1), reverse=True):
        if size == 1:
            continue
        if kept and kept[-1][1] == stride * size:
            kept[-1] = kept[-1][0] * size, stride
        else:
            kept.append((size, stride))
    if not kept or 0 in shape or (len(kept) == 1 and kept[0][1] == 1):
        return _ONE_AFTER_THE_OTHER
    if len(kept) > 4 or any(size >= 1 << 31 for size, _ in kept[1:]):
        return None
    kept = [(1, 0)] * (4 - len(kept)) + kept
    return (*(size for size, _ in kept[1:]), *(stride for _, stride in kept), 1)


def chunk_constants(kind: KernelKind, flags: int) -> dict[str, Any]:
    """Return what `reduce_chunks` is compiled for."""
    rows = _ROWS[kind.sort]
    return {"kind": kind.name, "size": kind.size, "sort": kind.sort, "tiny": kind.tiny, "flags": flags, "rows": rows}


def merge_constants(kind: KernelKind, flags: int) -> dict[str, Any]:
    """Return what `merge_parts` is compiled for."""
    return {"sort": kind.sort, "flags": flags, "levels": _MERGE_LEVELS}


def chunk_options(kind: KernelKind, flags: int) -> dict[str, Any]:
    """Return how `reduce_chunks` is compiled: registers that would leave a multiprocessor too few threads are bounded."""
    many = kind.sort == 0 and flags & CHECKSUM and (kind.size == 1 or (kind.size == 2 and flags & STATS))
    return {**OPTIONS, "maxnreg": 128} if many else OPTIONS


def chunk_of(count: int, kind: KernelKind) -> int:
    """Return elements a program, which follow from the length alone: enough programs for a device, few parts to merge."""
    packed = max(4 // kind.size, 1) if kind.sort == 0 else 1
    least, most = 4 * _ROWS[kind.sort] * packed * _LEAST, 4 * _ROWS[kind.sort] * 256
    return min(least << (max(count - 1, 0) // (least * _PARTS)).bit_length(), most)


def _mode(address: int, layout: tuple[int, ...], kind: KernelKind) -> int:
    """Return how the kernels read a tensor by its strides: 3 where 16 bytes at once, else 1."""
    _, _, n3, s0, s1, s2, s3, _ = layout
    together = 16 // kind.size
    return 1 if kind.sort or address % 16 or s3 != 1 or any(number % together for number in (n3, s0, s1, s2)) else 3


def jobs_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> Jobs:
    """Return the jobs of tensors, each with its row, leaving out those that the kernels cannot read."""
    jobs = Jobs()
    for t, row in pairs:
        jobs.add(t, row.data_ptr())
    return jobs
