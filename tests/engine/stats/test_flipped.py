"""The element and the bit that differ between two replicas, planted and found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainprobe.engine.stats import fingerprint
from trainprobe.engine.stats.flipped import flip_behind, flips, odd_one_out
from trainprobe.errors import UsageError

DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8", "bool"]


def drawn(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 50
    return (x > 0) if dtype == "bool" else x.astype(np.uint8 if dtype == "uint8" else dtype)


def flipped(array, place, bit):
    """Return a copy with one bit of one element flipped, by its bytes."""
    raw = bytearray(array.tobytes())
    at = place * array.itemsize + bit // 8
    raw[at] ^= 1 << bit % 8
    return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:-1]), shape=st.sampled_from([(), (1,), (7, 5), (3, 4, 6)]))
def test_one_planted_bit_is_found_by_comparing_and_by_the_fingerprint_alone(data, dtype, shape):
    a = drawn(shape, dtype)
    place = data.draw(st.integers(0, a.size - 1))
    bit = data.draw(st.integers(0, a.itemsize * 8 - 1))
    b = flipped(a, place, bit)
    count, (found,) = flips(a, b)
    assert (count, found.bits, found.index) == (
        1,
        (bit,),
        tuple(int(i) for i in np.unravel_index(place, shape)) if shape else (),
    )
    assert flip_behind(a, fingerprint(b)) == found
    assert (found.before ^ found.after) == 1 << bit


def test_the_part_of_a_float_is_told():
    a = np.ones((2, 3), np.float32)
    parts = {bit: flips(a, flipped(a, 4, bit))[1][0].part for bit in (0, 22, 23, 30, 31)}
    assert parts == {0: "mantissa", 22: "mantissa", 23: "exponent", 30: "exponent", 31: "sign"}
    half = np.full(3, 0x3F80, np.uint16)
    assert flips(half, flipped(half, 1, 7), dtype="torch.bfloat16")[1][0].part == "exponent"
    assert str(flips(a, flipped(a, 4, 30))[1][0]) == "[1][1]: bit 30 (exponent), 0x3f800000 against 0x7f800000"


def test_several_differences_are_counted_and_the_fingerprint_alone_tells_none():
    a = drawn((40, 9), "float32")
    b = flipped(flipped(a, 3, 5), 200, 30)
    count, found = flips(a, b)
    assert (count, [f.index for f in found]) == (2, [(0, 3), (22, 2)])
    assert flip_behind(a, fingerprint(b)) is None
    assert flips(a, a) == (0, [])
    assert flip_behind(a, fingerprint(a)) is None
    assert len(flips(a, -a, limit=4)[1]) == 4


def test_a_bit_far_into_a_large_tensor_is_found():
    a = drawn((1 << 20) + 77, "float16")
    found = flip_behind(a, fingerprint(flipped(a, (1 << 20) + 33, 9)))
    assert (found.index, found.bits) == (((1 << 20) + 33,), (9,))


def test_most_replicas_say_which_one_is_wrong():
    a = drawn((5, 5), "float32")
    bad = flipped(a, 7, 2)
    assert odd_one_out([a, bad, a]) == [1]
    assert odd_one_out([a, a.copy()]) == []
    assert odd_one_out([a, bad]) == []
    nan = np.full(3, np.nan, np.float32)
    assert odd_one_out([nan, nan.copy(), nan.copy()]) == []


def test_tensors_that_cannot_be_replicas_are_refused():
    with pytest.raises(UsageError, match=r"replicas have one shape and dtype, these are float32 \(2,\) and float32 \(3,\)"):
        flips(np.zeros(2, np.float32), np.zeros(3, np.float32))
