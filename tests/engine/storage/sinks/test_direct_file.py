"""A file that is written past the page cache holds the bytes it was given, whichever way they took."""

from __future__ import annotations

import hashlib
import math
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from trainprobe.engine.storage.dumps.direct_file import BLOCK, DirectFile

MB = 1 << 20
SIZES = [1, 0, BLOCK - 1, BLOCK, BLOCK + 1, 5 * MB + 3, 8 * MB, 3, 0, MB, 9 * MB, 7]
ODD = 13  # bytes from a block's begin: memory that the disk cannot read as it lies


def part(size: int, seed: int, skipped: int = 0) -> np.ndarray:
    """Return random bytes that begin `skipped` bytes behind a multiple of a block in memory."""
    memory = np.empty(size + 2 * BLOCK, np.uint8)
    begin = -memory.ctypes.data % BLOCK + skipped
    memory[begin : begin + size] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return memory[begin : begin + size]


def written(path: Path, sizes=SIZES, skipped=0, start=0) -> bytes:
    """Append parts of these sizes to a new file; return what must lie in it."""
    file = DirectFile(path, start)
    parts = [part(size, seed, skipped) for seed, size in enumerate(sizes)]
    for data in parts:
        file.append(data)
    file.finish()
    return b"".join(data.tobytes() for data in parts)


def assert_holds(path: Path, start: int, expected: bytes) -> None:
    found = path.read_bytes()
    assert found[:start] == bytes(start)
    assert len(found) == start + len(expected)
    assert hashlib.sha256(found[start:]).digest() == hashlib.sha256(expected).digest()


def takes_direct_write(path: Path, place: int) -> bool:
    """Ask the kernel for a write past the page cache at this byte of a new file."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    except OSError:
        return False
    try:
        return os.pwrite(file, part(BLOCK, 0).data, place) == BLOCK
    except OSError:
        return False
    finally:
        os.close(file)


@pytest.mark.parametrize("skipped", [0, ODD])
@pytest.mark.parametrize("start", [0, BLOCK, 64 * BLOCK])
def test_the_file_holds_what_was_appended(start, skipped, tmp_path):
    expected = written(tmp_path / "x", skipped=skipped, start=start)
    assert_holds(tmp_path / "x", start, expected)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * MB - 1, 4 * MB, 4 * MB + 1])
@pytest.mark.parametrize("skipped", [0, ODD])
def test_a_single_part_of_any_size_arrives_whole(size, skipped, tmp_path):
    expected = written(tmp_path / "x", [size], skipped)
    assert_holds(tmp_path / "x", 0, expected)


def test_many_small_parts_arrive_in_order(tmp_path):
    expected = written(tmp_path / "x", [1 + 997 * i % 20_000 for i in range(800)])
    assert_holds(tmp_path / "x", 0, expected)


@pytest.mark.parametrize("start", [0, 8])
def test_the_page_cache_is_passed_by_wherever_the_kernel_allows_it(start, tmp_path):
    """No disk takes a write past the cache at byte 8; a file system in memory may."""
    allowed = takes_direct_write(tmp_path / "asked", start)
    file = DirectFile(tmp_path / "x", start, patience=math.inf)
    parts = [part(size, seed) for seed, size in enumerate(SIZES)]
    for data in parts:
        file.append(data)
    assert file.direct == allowed
    file.finish()
    assert_holds(tmp_path / "x", start, b"".join(data.tobytes() for data in parts))


@pytest.mark.skipif(sys.platform != "linux", reason="a file of Linux that refuses O_DIRECT when it is opened")
def test_a_file_that_is_refused_when_it_is_opened_is_written_through_the_page_cache():
    name = Path("/proc/thread-self/comm")
    before = name.read_bytes()
    try:
        file = DirectFile(name)
        assert not file.direct
        file.append(b"a name")
        file.finish()
        assert name.read_bytes() == b"a name\n"
    finally:
        name.write_bytes(before)


def test_a_slow_disk_is_written_to_through_the_page_cache(tmp_path):
    file = DirectFile(tmp_path / "x", slowest=math.inf, patience=0)
    parts = [part(9 * MB, 0), part(9 * MB, 1), part(5, 2)]
    for data in parts:
        file.append(data)
        assert not file.direct
    file.finish()
    assert_holds(tmp_path / "x", 0, b"".join(data.tobytes() for data in parts))


def test_a_full_disk_is_an_error_and_leaves_what_was_written(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    parts = [part(8 * MB, seed) for seed in range(2)]
    file = DirectFile(tmp_path / "x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MB, hard))  # a file that grows beyond this fails, as on a full disk
    try:
        file.append(parts[0])
        with pytest.raises(OSError, match="too large"):
            file.append(parts[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.discard()
    found = (tmp_path / "x").read_bytes()
    assert found == b"".join(data.tobytes() for data in parts)[: len(found)]
    assert len(found) >= 8 * MB


def test_what_is_discarded_is_closed(tmp_path):
    file = DirectFile(tmp_path / "x")
    file.append(b"some")
    file.discard()
    file.discard()
    with pytest.raises(ValueError, match="closed"):
        file.append(part(8 * MB, 0))
