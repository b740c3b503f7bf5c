import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainprobe.engine.compare import Difference, compiled, measure, number_format
from trainprobe.engine.compare.measure import BLOCK, blocks
from trainprobe.engine.compare.number_formats import decode
from trainprobe.errors import CompareError

RNG = np.random.default_rng(0)
FLOATS = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5), elements=st.floats(width=32, allow_nan=True)
)


@pytest.fixture(autouse=True, scope="module", params=["compiled", "numpy"])
def path(request):
    """Run every test through the compiled kernel and through NumPy."""
    built = compiled.kernel
    if request.param == "compiled" and built is None:
        pytest.skip("the kernel is not built here")
    compiled.kernel = built if request.param == "compiled" else None
    yield request.param
    compiled.kernel = built


def oracle(a, b):
    """The definition, element by element in float64."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    both = np.isfinite(x) & np.isfinite(y)
    d = x[both] - y[both]
    return {
        "count": x.size,
        "changed": int((a.view(np.uint32) != b.view(np.uint32)).sum()),
        "nan_a": int(np.isnan(x).sum()),
        "nan_b": int(np.isnan(y).sum()),
        "square_d": float((d * d).sum()),
    }


def bfloat16(values):
    t = torch.tensor(values, dtype=torch.float32).bfloat16()
    return t.view(torch.int16).numpy().view(np.uint16)


def test_sums_agree_with_float64_over_several_blocks():
    a = RNG.standard_normal(3 * BLOCK + 7).astype(np.float32)
    b = a + RNG.standard_normal(a.size).astype(np.float32) * 1e-3
    d = measure(a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    expected = (np.sum((x - y) ** 2), np.sum(x * x), np.sum(y * y), np.sum(x * y), np.max(np.abs(x - y)))
    assert np.allclose((d.square_d, d.square_a, d.square_b, d.dot, d.max_abs), expected, rtol=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_counts_agree_with_the_definition_for_any_float32(data):
    a = data.draw(FLOATS)
    b = data.draw(st.one_of(st.just(a.copy()), hnp.arrays(np.float32, a.shape, elements=st.floats(width=32))))
    found, expected = measure(a, b), oracle(a, b)
    assert {k: getattr(found, k) for k in ("count", "changed", "nan_a", "nan_b")} == {
        k: expected[k] for k in ("count", "changed", "nan_a", "nan_b")
    }
    assert math.isclose(found.square_d, expected["square_d"], rel_tol=1e-9)


def test_identical_bits_leave_no_difference():
    a = RNG.standard_normal((100, 300)).astype(np.float32)
    d = measure(a, a.copy())
    assert (d.changed, d.l2, d.cosine, d.max_abs, d.max_ulp, d.at) == (0, 0.0, 1.0, 0.0, 0.0, None)


def test_one_flipped_element_is_found_at_its_place():
    a = RNG.standard_normal((300, 400)).astype(np.float32)
    b = a.copy()
    b[211, 17] += 1.0
    d = measure(a, b)
    assert (d.changed, d.at) == (1, (211, 17))


def test_the_place_is_right_in_arrays_that_are_not_contiguous():
    a = RNG.standard_normal((400, 300)).astype(np.float32)
    b = a.copy()
    b[5, 250] += 1.0
    assert measure(a.T[10:, :], b.T[10:, :]).at == (240, 5)


@pytest.mark.parametrize("start", [1.0, 1.5, -3.0, 1e-30, 7e20])
def test_the_next_number_is_one_unit_in_the_last_place_away(start):
    a = np.array([start], np.float32)
    assert measure(a, np.nextafter(a, np.float32(np.inf))).max_ulp == pytest.approx(1.0)


def test_rounding_to_bfloat16_is_at_most_half_a_unit_of_bfloat16_away():
    a = RNG.standard_normal(10_000).astype(np.float32)
    d = measure(a, bfloat16(a), number_format("float32"), number_format("bfloat16"))
    assert 0.4 < d.max_ulp <= 0.5


def test_values_that_bfloat16_holds_exactly_do_not_count_as_changed():
    a = np.array([1.0, -2.5, 0.0, 384.0], np.float32)
    assert measure(a, bfloat16(a), number_format("float32"), number_format("bfloat16")).changed == 0


def test_a_nan_on_one_side_only_is_misplaced_and_makes_the_largest_difference_infinite():
    a = np.ones(10, np.float32)
    b = a.copy()
    b[3] = np.nan
    d = measure(a, b)
    assert (d.misplaced, d.nan_a, d.nan_b, d.max_abs, d.at) == (1, 0, 1, math.inf, (3,))


def test_nan_and_infinity_on_both_sides_are_equal():
    a = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    d = measure(a, a.copy())
    assert (d.changed, d.misplaced, d.nan_a) == (0, 0, 1)


def test_one_nan_does_not_hide_the_rest():
    a = np.arange(10, dtype=np.float32)
    b = a.copy()
    b[0], b[5] = np.nan, 7.0
    assert measure(a, b).square_d == 4.0


def test_integers_are_measured_in_steps_of_one():
    d = measure(np.array([1, 2, 3]), np.array([1, 5, 3]))
    assert (d.changed, d.max_ulp, d.at) == (1, 3.0, (1,))


def test_a_negative_zero_is_a_changed_bit_without_distance():
    d = measure(np.array([0.0], np.float32), np.array([-0.0], np.float32))
    assert (d.changed, d.max_abs, d.max_ulp) == (1, 0.0, 0.0)


def test_complex_elements_are_counted_once():
    a = np.array([1 + 1j, 2 + 2j], np.complex64)
    d = measure(a, a + np.complex64(1j))
    assert (d.count, d.changed, d.at) == (2, 2, (0,))


def test_a_scalar_has_an_empty_place():
    assert measure(np.float32(1.0).reshape(()), np.float32(2.0).reshape(())).at == ()


def test_arrays_of_different_shapes_are_refused():
    with pytest.raises(CompareError, match="shapes"):
        measure(np.zeros(3), np.zeros(4))


def test_float64_values_too_large_to_square_are_still_compared():
    d = measure(np.array([1e200, 1.0]), np.array([1e200, 2.0]))
    assert (d.changed, d.max_abs, d.misplaced) == (1, 1.0, 0)


@settings(max_examples=100, deadline=None)
@given(hnp.array_shapes(min_dims=0, max_dims=4, max_side=9), st.integers(1, 50))
def test_blocks_cover_every_element_exactly_once(shape, size):
    seen = np.zeros(shape, int)
    for where in blocks(shape, size):
        seen[where] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("other", [-0.0, np.nan, -np.inf])
def test_what_is_at_no_distance_stands_where_the_bits_differ(other):
    a, b = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    b[1, 2] = other
    assert measure(a, b).at in ((1, 2), None)
    assert measure(a.T, b.T).at in ((2, 1), None)
    assert measure(a, -a).at == (0, 0)
    b[1, 2] = -0.0
    assert (measure(a, b).at, measure(a.T, b.T).at) == ((1, 2), (2, 1))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.data())
def test_parts_merge_to_the_difference_of_the_whole(n, data):
    a, b = (data.draw(hnp.arrays(np.float32, n, elements=st.floats(-100, 100, width=32))) for _ in "ab")
    cut = data.draw(st.integers(0, n))
    whole = measure(a, b)
    parts = measure(a[:cut], b[:cut]).merge(measure(a[cut:], b[cut:]).moved((cut,)))
    assert (parts.count, parts.changed, parts.max_abs, parts.max_ulp, parts.at) == (
        whole.count,
        whole.changed,
        whole.max_abs,
        whole.max_ulp,
        whole.at,
    )
    assert math.isclose(parts.square_d, whole.square_d, rel_tol=1e-12, abs_tol=1e-300)


def test_nothing_merged_with_a_difference_is_that_difference():
    d = measure(np.arange(4.0), np.ones(4))
    assert Difference().merge(d) == d == d.merge(Difference())


def test_opposite_arrays_have_cosine_minus_one():
    a = RNG.standard_normal(50).astype(np.float32)
    assert measure(a, -a).cosine == pytest.approx(-1.0)


def test_zeros_against_anything_have_no_cosine():
    assert measure(np.zeros(3), np.ones(3)).cosine is None


@pytest.mark.parametrize(
    "names",
    [
        ("float32", "float32"),
        ("float64", "float64"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float16"),
    ],
)
def test_both_ways_of_measuring_agree_for_every_pair_of_formats(names):
    built = compiled.kernel
    fa, fb = (number_format(n) for n in names)
    a, b = (RNG.integers(0, 256, 3 * 9001 * f.itemsize, dtype=np.uint8).view(f.storage)[: 2 * 9001] for f in (fa, fb))
    a, b = finite(a, fa), finite(b, fb)
    b[:9000] = a[:9000] if names[0] == names[1] else b[:9000]
    fast = measure(a, b, fa, fb)
    compiled.kernel = None
    slow = measure(a, b, fa, fb)
    compiled.kernel = built
    sums = ("square_d", "square_a", "square_b", "dot", "max_ulp")
    assert [getattr(fast, f) for f in ("count", "changed", "max_abs", "at")] == [
        getattr(slow, f) for f in ("count", "changed", "max_abs", "at")
    ]
    assert np.allclose([getattr(fast, f) for f in sums], [getattr(slow, f) for f in sums], rtol=1e-11)


def finite(bits, fmt):
    """Replace bits of NaN, infinity and values too large to square by those of zero."""
    with np.errstate(all="ignore"):
        values = decode(bits, fmt).astype(np.float64)
    return np.where(np.isfinite(values) & (np.abs(values) < 1e150), bits, np.zeros_like(bits))
