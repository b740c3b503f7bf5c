"""The compiled part keeps nothing of what it is given: no reference and no memory, over many calls of its entry points."""

from __future__ import annotations

import ctypes
import gc
import itertools
import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.compiled import recording
from trainprobe.engine.core.records import Call
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, STATS
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_NAMES
from trainprobe.engine.storage.step_journal import StepJournal
from trainprobe.engine.tape import SAVE, Tape

CALLS = 1000
ALL = STATS | CHECKSUM | CRC32
TENSOR = torch.arange(600.0).reshape(20, 30)
NAME, KEY = "a name of its own", "a key of its own"


def rows() -> None:
    stats_rows = recording.StatsRows()
    for t in (TENSOR, TENSOR.t(), TENSOR[::2, ::3]):
        stats_rows.add(t.data_ptr(), recording.DTYPES["float32"], tuple(t.shape), t.stride(), ALL)
    stats_rows.blank()
    recording.row_of(stats_rows, 0)
    stats_rows.take()


def rows_refused() -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        recording.StatsRows().add(0, 99, (1,), (1,), ALL)


def records() -> None:
    call = Call("module", NAME, 0, "forward", parent=None)
    call.args, call.kwargs, call.out = [NAME, {KEY: (1.5, None)}], {KEY: NAME}, [2**70]
    recording.structure([call])


def tape() -> None:
    arena = recording.Arena(SAFETENSORS_NAMES, lambda chunk: (chunk.keys(), chunk.items(), chunk.data))
    seen = Tape(TorchLibrary(), lambda *_: None, arena=arena)
    seen.tree([TENSOR, {KEY: TENSOR}], ALL | SAVE, NAME)
    seen.value(TENSOR, STATS)
    seen.touched(TENSOR)
    arena.flush()
    seen.native.reset()


def journal() -> None:
    kept = StepJournal(memoryview(bytearray(1 << 12)))
    kept.begin(3, b"{}")
    seen = Tape(TorchLibrary(), journal=kept)
    value = seen.tree([TENSOR, {KEY: TENSOR}], STATS)[0]
    seen.noted(value, NAME)
    kept.end()
    kept.close()


def copy() -> None:
    assert len(recording.bytes_at(TENSOR.data_ptr(), 2400)) == 2400


def state() -> list[int]:
    """Return the references to what is given, the blocks that Python has allocated, and the peak of memory in kB."""
    gc.collect()
    given: list[Any] = [TENSOR, NAME, KEY, SAFETENSORS_NAMES, None]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [*map(sys.getrefcount, given), sys.getallocatedblocks(), peak * 1024 // 1000]


def leaked(entry: Callable[[], object], calls: int = CALLS) -> bool:
    """Return whether each call leaves a reference, an object, or a kilobyte, and goes on doing so for three rounds."""
    states = [state()]
    for _ in range(3):
        for _ in range(calls):
            entry()
        states.append(state())
    grown = [[abs(after - had) for had, after in zip(*pair, strict=True)] for pair in itertools.pairwise(states)]
    return max(map(min, zip(*grown, strict=True))) >= calls // 2


@pytest.mark.parametrize("entry", [rows, rows_refused, records, tape, journal, copy], ids=lambda entry: entry.__name__)
def test_many_calls_leave_no_reference_no_object_and_no_memory(entry: Callable[[], None]) -> None:
    assert not leaked(entry, CALLS // 5 if entry in (tape, rows_refused, journal) else CALLS)


@pytest.mark.parametrize("make", [lambda: NAME, lambda: [NAME], lambda: bytes(4000)], ids=["argument", "object", "memory"])
def test_a_reference_too_many_would_be_seen(make: Callable[[], object]) -> None:
    assert leaked(lambda: ctypes.pythonapi.Py_IncRef(ctypes.py_object(make())))
