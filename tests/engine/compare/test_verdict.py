import numpy as np
import pytest

from trainprobe.engine.compare import judge, measure, noise_floor, number_format
from trainprobe.engine.compare.verdict import worst

F32, BF16, I64 = (number_format(n) for n in ("float32", "bfloat16", "int64"))


def test_equal_bits_are_identical():
    assert judge(measure(np.ones(3), np.ones(3)), 0.0) == "identical"


def test_a_neighbouring_number_is_rounding_for_stored_values():
    a = np.ones(3, np.float32)
    assert judge(measure(a, np.nextafter(a, np.float32(2))), noise_floor(F32, F32), stored=True) == "rounding"


def test_one_wrong_element_among_many_cannot_hide_in_the_norm_of_stored_values():
    a = np.full(1_000_000, 100.0, np.float32)
    b = a.copy()
    b[7] += 1e-3
    difference = measure(a, b)
    assert difference.relative_l2 < noise_floor(F32, F32)
    assert judge(difference, noise_floor(F32, F32), stored=True) == "bug"


def test_different_integers_are_never_rounding():
    assert judge(measure(np.array([1]), np.array([2])), noise_floor(I64, I64), stored=True) == "bug"


def test_a_float_sum_in_another_order_is_rounding():
    x = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    difference = measure(x.sum(axis=1), np.add.accumulate(x, axis=1)[:, -1].copy())
    assert judge(difference, noise_floor(F32, F32, 4096)) in ("identical", "rounding")


def test_an_error_just_above_the_floor_is_suspicious():
    a = np.ones(100)
    assert judge(measure(a, a * (1 + 3e-7)), noise_floor(F32, F32)) == "suspicious"


def test_a_misplaced_nan_is_a_bug_whatever_the_floor():
    assert judge(measure(np.ones(2), np.array([1.0, np.nan])), 1.0) == "bug"


@pytest.mark.parametrize(
    ("a", "b", "floor"), [(F32, F32, 2.0**-23), (F32, BF16, 2.0**-7), (I64, I64, 0.0), (I64, F32, 2.0**-23)]
)
def test_the_floor_is_one_unit_in_the_last_place_of_the_coarser_format(a, b, floor):
    assert noise_floor(a, b) == floor


def test_the_worst_of_several_verdicts_wins():
    assert worst(["identical", "suspicious", "rounding"]) == "suspicious"


def test_the_worst_of_none_is_identical():
    assert worst([]) == "identical"
