import numpy as np
import pytest

from trainprobe.engine.compare import measure, number_format
from trainprobe.engine.compare.rounding import agreement_of, noise_floor

F32, BF16, I64 = (number_format(n) for n in ("float32", "bfloat16", "int64"))


def test_equal_bits_are_identical():
    assert agreement_of(measure(np.ones(3), np.ones(3)), 0.0) == "identical"


def test_a_neighbouring_number_is_rounding():
    a = np.ones(3, np.float32)
    assert agreement_of(measure(a, np.nextafter(a, np.float32(2))), noise_floor(F32, F32)) == "rounding"


def test_one_wrong_element_among_many_cannot_hide_in_the_norm():
    a = np.full(1_000_000, 100.0, np.float32)
    b = a.copy()
    b[7] += 1e-3
    difference = measure(a, b)
    assert difference.relative_l2 < noise_floor(F32, F32)
    assert agreement_of(difference, noise_floor(F32, F32)) == "differ"


def test_different_integers_are_never_rounding():
    assert agreement_of(measure(np.array([1]), np.array([2])), noise_floor(I64, I64)) == "differ"


def test_a_misplaced_nan_differs_whatever_the_floor():
    assert agreement_of(measure(np.ones(2), np.array([1.0, np.nan])), 1.0) == "differ"


@pytest.mark.parametrize(
    ("a", "b", "floor"), [(F32, F32, 2.0**-23), (F32, BF16, 2.0**-7), (I64, I64, 0.0), (I64, F32, 2.0**-23)]
)
def test_the_floor_is_one_unit_in_the_last_place_of_the_coarser_format(a, b, floor):
    assert noise_floor(a, b) == floor
