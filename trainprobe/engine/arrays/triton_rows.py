"""Rows by the Triton kernels, where a device has them: how they are launched, and why they are trusted.

Triton comes with PyTorch for CUDA and is imported only where a tensor of such a device is reduced. A kernel that was never seen
to run is not believed: the first step that meets a dtype reduces it by torch's operations, and beside that a few small tensors
by both. Their rows cross to the host with that step's one transfer, so this waits for nothing, and from the next step on the
kernels reduce that dtype if the rows agree. Where they do not agree, or Triton cannot compile or launch, the device stays with
torch's operations for good, and `refusals` says why.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_checksum import mix
from trainprobe.engine.arrays.torch_reduce import write_row
from trainprobe.engine.arrays.triton_jobs import (
    COLUMNS,
    KINDS,
    OPTIONS,
    PART,
    TAKEN,
    Jobs,
    KernelKind,
    chunk_constants,
    chunk_of,
    chunk_options,
    jobs_of,
    merge_constants,
)
from trainprobe.engine.stats.partials import CHECKSUM, DEVIATIONS, PARTIALS

DEVICES = {"cuda"}
_TOGETHER = 512  # tensors of one launch at most
_COPIED = 64 << 20  # bytes of a tensor that is laid out anew where its strides are too many: torch's operations take far longer
Key = tuple[torch.dtype, int]  # a dtype, and the flags that the kernels handle


def launch(jobs: Jobs, kind: KernelKind, flags: int, device: torch.device) -> None:
    """Reduce tensors of one dtype into their rows by two launches; waits for nothing."""
    from trainprobe.engine.arrays.triton_kernels import reduce_chunks
    from trainprobe.engine.arrays.triton_merge import merge_parts

    table, blocks = jobs.table(kind)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        there = _brought(table.reshape(-1), device)
        parts = torch.empty(max(blocks, 1) * PART, dtype=torch.int64, device=device)
        arguments = there.data_ptr(), len(jobs), parts.data_ptr(), blocks
        if blocks:
            _run(reduce_chunks, blocks, arguments, chunk_constants(kind, flags), chunk_options(kind, flags), device)
        _run(merge_parts, len(jobs), arguments, merge_constants(kind, flags), OPTIONS, device)


_compiled: dict[tuple[Any, ...], Any] = {}


def _run(
    kernel: Any,
    programs: int,
    arguments: tuple[int, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    device: torch.device,
) -> None:
    """Launch a kernel; what is compiled already is launched as it is, without Triton looking at the arguments."""
    key = (id(kernel), device, *constants.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*arguments, *constants.values())
    elif (compiled := kernel[programs,](*arguments, **constants, **options)) is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled


def _brought(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return int64 numbers on the device; from pinned memory, which torch keeps until it was copied: this waits for nothing."""
    if device.type == "cpu":
        return torch.from_numpy(numbers)
    room = max(len(numbers), _TOGETHER * COLUMNS)  # of one size, which torch has at hand after the first
    host = torch.empty(room, dtype=torch.int64, pin_memory=device.type == "cuda")[: len(numbers)]
    host.numpy()[:] = numbers
    return host.to(device, non_blocking=True)


class Trust:
    """Whether the kernels are believed on one device: nothing yet, (dtype, flags) that are on trial or proven, or a refusal."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.refusal = ""
        self._proven: dict[Key, bool] = {}

    def known(self, key: Key) -> bool:
        """Tell whether these were tried, are being tried, or are not for the kernels."""
        return key in self._proven or bool(self.refusal) or key[0] not in KINDS or not key[1]

    def proven(self, key: Key) -> bool:
        """Tell whether the kernels agreed with torch's operations."""
        return not self.refusal and self._proven.get(key, False)

    def trying(self, key: Key) -> None:
        """Keep that these are on trial."""
        self._proven[key] = False

    def settle(self, key: Key, difference: str) -> None:
        """Believe the kernels, or refuse them with what was found."""
        self._proven[key] = True
        if difference:
            self.refuse(f"for {key[0]} they differ from torch's operations in {difference}")

    def refuse(self, why: str) -> None:
        """Use the kernels no more on this device."""
        self.refusal = self.refusal or (
            f"the Triton kernels are not used on {self.device}: {why}. Torch's own operations reduce there, more slowly and "
            "with the same results; `native: false` in the plan chooses them from the start"
        )


_trusts: dict[torch.device, Trust] = {}


@cache
def _faults() -> tuple[type[Exception], ...]:
    """Return what compiling and launching raise, where there is no C compiler for the launcher for one."""
    from triton.runtime.errors import TritonError

    plain = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, OSError)
    return (*plain, subprocess.SubprocessError, TritonError)


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def trust_in(device: torch.device) -> Trust:
    """Return what is known of the kernels on a device."""
    return _trusts.setdefault(device, Trust(device))


def kernels_of(device: torch.device) -> TritonRows | None:
    """Return what reduces on a device by the kernels, None where there are none or they cannot be used."""
    if device.type not in DEVICES or not _triton_is_there():
        return None
    return TritonRows(trust_in(device))


def refusals() -> list[str]:
    """Return why devices that have kernels do without them."""
    return [trust.refusal for trust in _trusts.values() if trust.refusal]


class TritonRows:
    """What the kernels reduce of one device's rows in one step. A row is int64 [>= 13]: 12 partials, the fingerprint."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._trials: list[tuple[Key, Tensor]] = []

    def add_all(self, tensors: Sequence[Tensor], flags: int, address: int, step: int) -> list[int]:
        """Reduce at most 512 tensors into rows from an address on, `step` bytes apart, by one pair of launches a dtype.

        Returns the places of those that are left to torch's operations.
        """
        left: list[int] = []
        copies: list[Tensor] = []  # held until they are launched
        found: dict[torch.dtype, tuple[list[int], Jobs] | None] = {}  # places and jobs; None: not for the kernels
        ordered = bool(flags & CHECKSUM)
        for i, t in enumerate(tensors):
            if t.dtype not in found:
                found[t.dtype] = self._believed((t.dtype, flags & TAKEN))
            taken = found[t.dtype]
            if taken is None:
                left.append(i)
            elif taken[1].add(t, address + i * step, ordered):
                taken[0].append(i)
            elif t.nbytes <= _COPIED:
                copies.append(t.resolve_conj().resolve_neg().contiguous())
                taken[1].add(copies[-1], address + i * step)
                taken[0].append(i)
            else:
                left.append(i)
        for dtype, taken in found.items():
            if taken is not None and taken[0] and not self._launch(taken[1], (dtype, flags & TAKEN)):
                left += taken[0]
        return left

    def _believed(self, key: Key) -> tuple[list[int], Jobs] | None:
        """Return where tensors of a dtype are put together; None where the kernels are not to reduce them, or not yet."""
        if not self._trust.known(key):
            self._try_out(key)
        return ([], Jobs()) if self._trust.proven(key) else None

    def _try_out(self, key: Key) -> None:
        """Reduce samples of a dtype: by torch's operations, by the kernels together, and the first two by the kernels alone."""
        self._trust.trying(key)
        tensors = samples(key[0], self._trust.device)
        tensors += [*tensors, *tensors[:2]]
        block = torch.zeros((len(tensors), len(PARTIALS) + 1), dtype=torch.int64, device=self._trust.device)
        for t, row in zip(tensors[:SAMPLES], block, strict=False):
            write_row(t, key[1], row)
        by_kernel = [*zip(tensors, block, strict=True)][SAMPLES:]
        if all(self._launch(jobs_of(some), key) for some in (by_kernel[:SAMPLES], by_kernel[-2:-1], by_kernel[-1:])):
            self._trials.append((key, block))

    def blocks(self) -> list[Tensor]:
        """Return what has to be brought to the host, the rows of what was tried."""
        return [block for _, block in self._trials]

    def settle(self, brought: Iterator[npt.NDArray[Any]]) -> None:
        """Judge what was tried, from the blocks on the host."""
        trials, self._trials = self._trials, []
        for key, _ in trials:
            rows = next(brought).reshape(-1, len(PARTIALS) + 1)
            by_torch, by_kernel = rows[[*range(SAMPLES), 0, 1]], rows[SAMPLES:]
            self._trust.settle(key, difference(by_torch, by_kernel, key[0].is_complex))

    def _launch(self, jobs: Jobs, key: Key) -> bool:
        try:
            launch(jobs, KINDS[key[0]], key[1], self._trust.device)
        except _faults() as fault:
            self._trust.refuse(f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}")
            return False
        return True


SAMPLES = 6


def samples(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Make tensors of nearly random bits on the device: several chunks, so of finite numbers, two strided ones, one, none."""
    kind = KINDS[dtype]
    n = chunk_of(0, kind) + 5077
    bits = mix(torch.arange(1, n * max(kind.size // 8, 1) + 1, dtype=torch.int64, device=device))
    if kind.sort == 2:  # magnitudes below 2, and a few non-finite ones: sums of all float64 would leave the range
        bits &= ~(1 << 62)
        for place, pattern in ((7, 0x7FF0), (8, -0x10), (2 * n // 3, 0x7FF8)):
            bits[place : place + 1] = pattern << 48
    finite = bits & ~(1 << min(8 * kind.size, 64) - 2)  # the first bit of a float's exponent
    if dtype == torch.bool:
        whole, small = bits % 3 == 0, bits % 5 == 0
    elif kind.size >= 8:
        whole, small = bits.view(dtype), finite.view(dtype)
    else:
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.size]
        whole, small = bits.to(words).view(dtype), finite.to(words).view(dtype)
    heads = small[:4096].view(4, 8, 2, 64)[:, :, 0].transpose(0, 1)
    return [whole, small, whole[: 60 * 90].view(60, 90).t()[3:, ::2], heads, whole[5], whole[:0]]


def difference(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], magnitudes: bool = False) -> str:
    """Name what differs by more than rounding between rows int64 [n, 13] of the same tensors; empty where nothing does.

    magnitudes: of complex numbers, which are rounded before they are compared.
    """
    x, y = (np.ascontiguousarray(rows[:, :-1]).view(np.float64) for rows in (a, b))
    columns = dict(zip(PARTIALS, x.T, strict=True))
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        allowed = np.full_like(x, -1.0)  # equal, but for:
        squares = columns["sumsq"] * 2.0**-40
        allowed[:, PARTIALS.index("sum")] = (
            np.sqrt(columns["count"] * columns["sumsq"]) * np.exp2(columns["exponent"]) * 2.0**-40
        )
        allowed[:, PARTIALS.index("sumsq")] = squares
        for name, power in DEVIATIONS.items():
            allowed[:, PARTIALS.index(name)] = (np.sqrt(columns["sumsq"]) * np.exp2(columns["exponent"])) ** power * 2.0**-40
        if magnitudes:
            allowed[:, [PARTIALS.index("min"), PARTIALS.index("max")]] = (
                np.abs(x[:, [PARTIALS.index("min"), PARTIALS.index("max")]]) * 2.0**-51
            )
    same = (x == y) | (np.isnan(x) & np.isnan(y)) | (distance <= allowed)
    wrong = [name for name, fits in zip(PARTIALS, same.T, strict=True) if not fits.all()]
    return ", ".join(wrong if (a[:, -1] == b[:, -1]).all() else [*wrong, "fingerprint"])
