"""The 64-bit fingerprint and the CRC-32: one number for equal bits, whoever computes it and however they lie in memory."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_oracle import ALL_DTYPES, IMPLEMENTATIONS, REDUCERS, bits_of, rows_of, sample

from tests.matrices import examples
from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.arrays.torch_checksum import crc32_register, fingerprint_of_chunk, share_of
from trainprobe.engine.arrays.torch_chunks import chunks
from trainprobe.engine.geometry.shards import Shard
from trainprobe.engine.stats.checksum import MASK, fingerprint, keys, shard_fingerprint, terms
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, STATS


def checksum_of(t: torch.Tensor, native: bool | str, flags: int = CHECKSUM) -> int:
    stats_rows = rows_of(native, flags)
    assert stats_rows.add(t) == 0
    sums = stats_rows.drain()[1]
    assert sums is not None
    return int(sums[0])


def crc_of(t: torch.Tensor, native: bool) -> int:
    stats_rows = TorchStatsRows(CRC32, native=native)
    assert stats_rows.add(t) == 0
    crcs = stats_rows.drain()[2]
    assert crcs is not None
    return crcs[0]


def layouts(dtype: torch.dtype) -> list[torch.Tensor]:
    t = sample(dtype, 45, 52)
    return [
        *(t, t.t(), t[::2, 3::7], t[:, :1].expand(-1, 5), t[4, 4], t[:0], t[:, 9]),
        *(sample(dtype, 3, 4, 5, 6).permute(0, 2, 1, 3), sample(dtype, 3, 130, 65).permute(2, 0, 1), sample(dtype, 20000)),
    ]


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_fingerprint_equals_the_reference_in_every_layout(native: bool | str, dtype: torch.dtype) -> None:
    for t in layouts(dtype):
        assert checksum_of(t, native) == fingerprint(bits_of(t)), (t.shape, t.stride())


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_crc32_equals_that_of_zlib_in_every_layout(native: bool | str, dtype: torch.dtype) -> None:
    for t in layouts(dtype):
        assert crc_of(t, native) == zlib.crc32(bits_of(t).tobytes()), (t.shape, t.stride())


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_crc32_of_several_blocks_is_joined_rightly(native: bool) -> None:
    t = sample(torch.bfloat16, 3 * 65536 + 4097)
    assert crc_of(t, native) == zlib.crc32(bits_of(t).tobytes())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex64], ids=str)
def test_crc32_by_device_operations_equals_that_of_zlib(dtype: torch.dtype) -> None:
    for t in layouts(dtype):
        assert int(crc32_register(t, chunk=777)) == zlib.crc32(bits_of(t).tobytes())


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_swapping_two_different_elements_changes_the_fingerprint(native: bool | str, dtype: torch.dtype) -> None:
    t = sample(dtype, 5000)
    bits = t.view(torch.uint8).reshape(5000, -1)
    other = next(i for i in range(1, 5000) if not torch.equal(bits[i], bits[0]))
    swapped = bits.clone()
    swapped[0], swapped[other] = bits[other], bits[0]
    assert checksum_of(t, native) != checksum_of(swapped.reshape(-1).view(dtype), native)


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_every_bit_of_an_element_counts(native: bool) -> None:
    t = torch.zeros(300, dtype=torch.int64)
    seen = {checksum_of(t, native)}
    for bit in range(64):
        changed = t.clone()
        changed[123] = 1 << bit if bit < 63 else -(2**63)
        seen.add(checksum_of(changed, native))
    assert len(seen) == 65


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_negative_zero_and_nan_payloads_are_told_apart(native: bool) -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum_of(nan[:1], native) != checksum_of(nan[1:], native)
    assert checksum_of(torch.tensor([0.0]), native) != checksum_of(torch.tensor([-0.0]), native)


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2), (1, 4)])
def test_shape_does_not_enter_the_fingerprint(native: bool, shape: tuple[int, ...]) -> None:
    t = torch.ones(shape)
    assert checksum_of(t, native) == fingerprint(t.numpy().reshape(-1))


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_a_checksum_alone_leaves_the_statistics_out(native: bool) -> None:
    stats_rows = TorchStatsRows(CHECKSUM, native=native)
    stats_rows.add(torch.ones(5))
    both = TorchStatsRows(CHECKSUM | STATS, native=native)
    both.add(torch.ones(5))
    alone, together = stats_rows.drain(), both.drain()
    assert np.isnan(alone[0][0][7]) and together[0][0][7] == 5
    assert alone[1] is not None and together[1] is not None and alone[1][0] == together[1][0]


def whole_by_torch(t: torch.Tensor) -> int:
    total, place = 0, 0
    for chunk in chunks(t):
        share, n = fingerprint_of_chunk(chunk.resolve_conj().resolve_neg(), place)
        total, place = total + int(share), place + n
    return total & MASK


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 7),
    st.data(),
    st.sampled_from([torch.float32, torch.complex128, torch.bfloat16]),
)
def test_shares_of_shards_add_up_to_the_whole(a: int, b: int, c: int, data: st.DataObject, dtype: torch.dtype) -> None:
    t = sample(dtype, a, b, c)
    cut_a, cut_c = data.draw(st.integers(0, a)), data.draw(st.integers(0, c))
    by_torch, by_numpy = 0, 0
    for rows, row in ((slice(0, cut_a), 0), (slice(cut_a, a), cut_a)):
        for columns, column in ((slice(0, cut_c), 0), (slice(cut_c, c), cut_c)):
            shard = t[rows, :, columns]
            by_torch += int(share_of(shard, Shard((row, 0, column), tuple(shard.shape), (a, b, c))))
            raw = bits_of(shard) if dtype != torch.complex128 else shard.numpy()
            by_numpy += shard_fingerprint(raw.reshape(shard.shape), (row, 0, column), (a, b, c))
    assert by_torch & MASK == by_numpy & MASK == fingerprint(bits_of(t)) == whole_by_torch(t)


def rectangle(t: torch.Tensor, shard: Shard) -> torch.Tensor:
    """What a rank holds: a view of the whole where it can be one."""
    if shard.within is not None:
        return rectangle(t, shard.within).reshape(-1)[shard.offset[0] :][: shard.shape[0]]
    if len(shard.whole) < t.dim():
        return t.reshape(-1)[shard.offset[0] :][: shard.shape[0]]
    return t[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Shard]]:
    """A shape, and shards that cover it once: rectangles, flat pieces of the whole, and flat pieces of rectangles."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    cut = draw(st.integers(0, shape[dim]))
    halves = []
    for begin, size in ((0, cut), (cut, shape[dim] - cut)):
        offset, part = [0] * len(shape), list(shape)
        offset[dim], part[dim] = begin, size
        halves.append(Shard(tuple(offset), tuple(part), shape))
    found: list[Shard] = []
    for half in halves if draw(st.booleans()) else [Shard((0,) * len(shape), shape, shape)]:
        n = math.prod(half.shape)
        if draw(st.booleans()):
            found.append(half)
            continue
        at = draw(st.integers(0, n))
        whole = half.shape == shape
        found += [Shard((begin,), (size,), (n,), within=None if whole else half) for begin, size in ((0, at), (at, n - at))]
    return shape, found


@settings(max_examples=examples(150))
@given(partitions(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex128]))
def test_rows_hold_the_shares_of_shards_which_add_up_to_the_whole(partition: tuple[Any, ...], dtype: torch.dtype) -> None:
    """By the compiled kernel, by torch's operations, and by NumPy, compiled and not."""
    shape, shards = partition
    t = sample(dtype, *shape)
    plain = str(dtype).removeprefix("torch.")
    for rows in (
        TorchStatsRows(CHECKSUM, native=True),
        TorchStatsRows(CHECKSUM, native=False),
        NumpyStatsRows(CHECKSUM, compiled=True),
        NumpyStatsRows(CHECKSUM, compiled=False),
    ):
        for shard in shards:
            part = rectangle(t, shard)
            if isinstance(rows, TorchStatsRows):
                rows.add_share(part, shard)
            else:
                rows.add_share(bits_of(part).reshape(part.shape) if dtype != torch.complex128 else part.numpy(), plain, shard)
        sums = rows.drain()[1]
        assert sums is not None
        assert sum(int(n) for n in sums) & MASK == fingerprint(bits_of(t) if dtype != torch.complex128 else t.numpy())


def test_a_share_is_not_taken_of_what_the_shard_does_not_describe() -> None:
    rows = TorchStatsRows(CHECKSUM)
    assert rows.add_share(torch.ones(3, 4), Shard((0, 0), (3, 5), (6, 5))) == []  # padded, say
    assert rows.add_share(torch.ones(3, 4, device="meta"), Shard((0, 0), (3, 4), (6, 4))) == []
    assert len(rows) == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, np.complex128])
def test_the_reference_is_the_published_definition_in_plain_integers(dtype: type) -> None:
    def k(j: int) -> int:
        x = (j + 1) * 0x9E3779B97F4A7C15 & MASK
        for _ in range(2):
            x ^= x >> 32
            x = x * 0xD6E8FEB86659FD93 & MASK
        return x ^ x >> 32

    x = np.arange(700).astype(dtype)
    size = x.itemsize
    if size < 4:
        words = [int.from_bytes(x[i].tobytes(), "little") for i in range(x.size)]
    else:
        raw = x.tobytes()
        words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    total = 0
    for place, word in enumerate(words):
        key = k(place % 256) ^ k(256 + place // 256)
        swapped = (word & 0xFFFF) << 16 | word >> 16
        total += (word ^ key & 0xFFFFFFFF) * (swapped ^ key >> 32) + 0x9E3779B97F4A7C15
    assert fingerprint(x) == total & MASK


def test_the_fingerprints_that_files_carry_have_not_moved() -> None:
    assert fingerprint(np.arange(10, dtype=np.float32)) == 15201188324957150942


@pytest.mark.parametrize("bit", [0, 15, 16, 23, 31])
def test_sets_of_one_flipped_bit_are_told_apart(bit: int) -> None:
    """Flips of the same bit change the fingerprint by multiples of a power of two, the least of all kinds of change."""
    rng = np.random.default_rng(bit)
    bits = rng.integers(0, 1 << 32, 64, dtype=np.uint64)
    key = keys(np.arange(64, dtype=np.uint64))
    change = terms(bits ^ np.uint64(1 << bit), key) - terms(bits, key)
    chosen = rng.integers(0, 2, (1 << 18, 64), dtype=np.uint64)
    sums = (chosen * change).sum(axis=1, dtype=np.uint64)
    assert np.unique(sums).size == np.unique(chosen, axis=0).shape[0]


def test_rows_and_blocks_that_change_places_change_the_fingerprint() -> None:
    x = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    orders = [np.roll(np.arange(256), shift) for shift in range(256)]
    orders += [np.random.default_rng(i).permutation(256) for i in range(64)]
    assert len({fingerprint(x[order]) for order in orders} | {fingerprint(x[:, order]) for order in orders}) == 2 * 320 - 1


def test_lengths_of_zeros_and_small_numbers_are_told_apart() -> None:
    zeros = {fingerprint(np.zeros(n, np.float32)) for n in range(1000)}
    numbers = {fingerprint(np.array(x, np.uint32)) for x in range(20000)}
    assert len(zeros) == 1000 and len(numbers) == 20000
