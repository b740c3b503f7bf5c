"""Partials of every dtype, layout and content, by the kernel and by torch's operations, against exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reduction_oracle import ALL_DTYPES, AT, COMPLEX, FLOATS, REDUCERS, assert_true, row_of, rows_of, sample, truth

from trainprobe.engine.arrays.torch_chunks import CHUNK
from trainprobe.engine.arrays.torch_reduce import reduce_tensor
from trainprobe.engine.stats.partials import CHECKSUM, PARTIALS, STATS, STD, SUBNORMAL, finish


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded", "scalar", "empty", "permuted", "column"])
def test_partials_are_exact_or_within_the_stated_bound(native: bool | str, dtype: torch.dtype, layout: str) -> None:
    t = sample(dtype, 33, 67)
    t = {
        "contiguous": t,
        "transposed": t.t(),
        "sliced": t[1::3, 2:60:5],
        "expanded": t[:, :1].expand(-1, 9),
        "scalar": t[3, 5],
        "empty": t[:0],
        "permuted": sample(dtype, 3, 5, 7, 11).permute(2, 0, 3, 1),
        "column": t[:, 4],
    }[layout]
    assert_true(row_of(t, native), t)


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_tensors_of_several_chunks_and_blocks_stay_within_the_bound(native: bool | str, dtype: torch.dtype) -> None:
    t = sample(dtype, 4096 * 5 + 17)
    assert_true(row_of(t, native), t)


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("place", [0, 15, 16, 4095, 4096, 5000])
def test_non_finite_elements_are_counted_apart_wherever_they_stand(native: bool | str, dtype: torch.dtype, place: int) -> None:
    t = sample(dtype, 5001)
    for i, odd in enumerate((float("nan"), float("inf"), -float("inf"), float("nan"))):
        t[(place + i * 7) % 5001] = odd
    assert_true(row_of(t, native), t)


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tensor_of_nothing_but_one_odd_value_is_told_rightly(native: bool | str, dtype: torch.dtype, odd: str) -> None:
    t = torch.full((19,), float(odd), dtype=dtype)
    assert_true(row_of(t, native, STATS | STD), t)


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extremes_and_subnormals_and_negative_zeros(native: bool | str, dtype: torch.dtype) -> None:
    about = torch.finfo(dtype)
    t = torch.tensor([about.max, about.min, about.tiny, about.tiny / 2, -about.tiny / 4, -0.0, 0.0], dtype=dtype)
    row = row_of(t, native, STATS | SUBNORMAL)
    assert_true(row, t)
    assert row[AT["subnormal"]] == 2
    zeros = row_of(torch.tensor([-0.0, -0.0], dtype=dtype), native)
    assert zeros[AT["zero"]] == 2 and not np.signbit(zeros[AT["min"]]) and not np.signbit(zeros[AT["max"]])


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_zeros_and_extremes_have_a_magnitude(native: bool | str, dtype: torch.dtype) -> None:
    about = torch.finfo(dtype)
    edges = [
        complex(0),
        complex(-0.0, 0.0),
        complex(0, about.tiny),
        complex(about.tiny, about.tiny / 2),
        complex(about.max, 0),
        3 + 4j,
    ]
    assert_true(row_of(torch.tensor(edges, dtype=dtype), native), torch.tensor(edges, dtype=dtype))
    assert_true(row_of(torch.zeros(7, dtype=dtype), native), torch.zeros(7, dtype=dtype))


@pytest.mark.parametrize("native", REDUCERS)
def test_a_half_precision_norm_that_overflows_in_half_precision_does_not(native: bool | str) -> None:
    t = torch.full((1000,), 60000.0, dtype=torch.float16)
    norm = finish(row_of(t, native)[None])["norm"][0]
    assert norm == pytest.approx(float(t.double().norm()), rel=1e-14)
    assert torch.isinf(t.norm())


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("size", [1e200, 1e308, 1e-200, 5e-324, 1e-310])
def test_float64_norms_whose_squares_leave_the_range(native: bool | str, size: float) -> None:
    t = torch.full((9000,), size, dtype=torch.float64)
    t[::2] *= -1
    norm = finish(row_of(t, native)[None])["norm"][0]
    assert norm == pytest.approx(size * 9000**0.5, rel=1e-13, abs=5e-324)


@pytest.mark.parametrize("native", REDUCERS)
def test_chunks_of_huge_and_tiny_float64_merge(native: bool | str) -> None:
    t = torch.full((4096 * 3,), 1e-300, dtype=torch.float64)
    assert finish(row_of(torch.cat((torch.zeros(4096), t)), native)[None])["norm"][0] == pytest.approx(
        1e-300 * 12288**0.5, rel=1e-13
    )
    t[5000] = 1e300
    assert finish(row_of(t, native)[None])["norm"][0] == pytest.approx(1e300, rel=1e-13)


@pytest.mark.parametrize("native", REDUCERS)
def test_many_large_float64_in_one_chunk_count_beside_a_few_larger_ones_in_another(native: bool | str) -> None:
    n = 1 << 18  # elements of a chunk of torch's operations
    t = torch.full((n + 1500 if native is False else 3000,), 2.0**479, dtype=torch.float64)
    t[-1] = 2.0**481
    norm = finish(row_of(t, native)[None])["norm"][0]
    assert norm == pytest.approx(2.0**479 * (t.numel() - 1 + 16) ** 0.5, rel=1e-13)


@pytest.mark.parametrize("native", REDUCERS)
def test_float64_sums_are_compensated(native: bool | str) -> None:
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(1))
    t = torch.tensor([1.0, 1e100, 1.0, -1e100] * 1000, dtype=torch.float64)[order]
    small = torch.tensor([1e16, 1.0, -1e16, 1.0] * 1000, dtype=torch.float64)
    assert row_of(small, native)[AT["sum"]] == 2000.0
    assert_true(row_of(t, native), t)


@pytest.mark.parametrize("native", REDUCERS)
@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d != torch.bool and "e8m0" not in str(d)], ids=str)
def test_std_is_that_of_exact_arithmetic(native: bool | str, dtype: torch.dtype) -> None:
    t = sample(dtype, 101, 97)
    want = truth(t)
    exact = (float(want.m2) / (want.count - 1)) ** 0.5
    assert finish(row_of(t, native, STATS | STD)[None], ["std"])["std"][0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("native", REDUCERS)
def test_std_far_from_zero_keeps_its_digits(native: bool | str) -> None:
    t = (1e6 + torch.randn(9001, generator=torch.Generator().manual_seed(0))).float()
    want = np.std(t.double().numpy(), ddof=1)
    assert finish(row_of(t, native, STATS | STD)[None], ["std"])["std"][0] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("native", REDUCERS)
def test_std_of_an_expanded_tensor_counts_each_repetition(native: bool | str) -> None:
    t = torch.arange(5.0)[:, None].expand(5, 7)
    assert finish(row_of(t, native, STATS | STD)[None], ["std"])["std"][0] == pytest.approx(float(t.double().std()), rel=1e-14)


@pytest.mark.parametrize("native", REDUCERS)
def test_an_infinite_part_makes_a_complex_magnitude_infinite(native: bool | str) -> None:
    nan, inf = float("nan"), float("inf")
    t = torch.tensor([complex(inf, nan), complex(nan, -inf), complex(nan, 1), complex(3, 4)])
    row = row_of(t, native)
    assert (row[AT["posinf"]], row[AT["nan"]], row[AT["min"]], row[AT["sum"]]) == (2, 1, 5, 5)


@pytest.mark.parametrize("native", REDUCERS)
def test_lazy_conjugates_and_negations_are_resolved(native: bool | str) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    negated = z.conj().imag
    assert negated.is_neg()
    assert row_of(negated, native)[AT["sum"]] == 2
    stats_rows = rows_of(native, CHECKSUM)
    for t in (z.conj(), z.conj().resolve_conj(), negated, negated.resolve_neg()):
        stats_rows.add(t)
    sums = stats_rows.drain()[1]
    assert sums is not None and sums[0] == sums[1] and sums[2] == sums[3]


@pytest.mark.parametrize("native", REDUCERS[:1])
def test_flushing_of_subnormals_in_torch_does_not_reach_the_kernel(native: bool | str) -> None:
    t = torch.full((50,), 1e-40)
    before = row_of(t, native)
    assert torch.set_flush_denormal(True)
    try:
        after = row_of(t, native)
    finally:
        torch.set_flush_denormal(False)
    assert before.tobytes() == after.tobytes() and after[AT["zero"]] == 0


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.data(),
    st.sampled_from([torch.float32, torch.int16, torch.float64, torch.complex64, torch.bool, torch.bfloat16]),
)
def test_any_shape_and_strides(shape: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    t = sample(dtype, *shape)
    t = t.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(t.dim()):
        step = data.draw(st.integers(1, 3))
        t = t[(slice(None),) * dim + (slice(data.draw(st.integers(0, 1)), None, step),)]
    if data.draw(st.booleans()):
        dim, times = data.draw(st.integers(0, t.dim())), data.draw(st.integers(1, 4))
        t = t.unsqueeze(dim).expand(*t.shape[:dim], times, *t.shape[dim:])
    for reducer in REDUCERS:
        assert_true(row_of(t, reducer.values[0]), t)


@pytest.mark.parametrize("wanted", [STATS, STATS | STD])
def test_deviations_of_several_chunks_are_summed_only_where_they_are_wanted(wanted: int) -> None:
    x = torch.arange(CHUNK * 2.0)
    row, _ = reduce_tensor(x, wanted)
    exact = float(((x.double() - x.double().mean()) ** 2).sum()) if wanted & STD else float("nan")
    assert float(row[PARTIALS.index("m2")]) == pytest.approx(exact, rel=1e-12, nan_ok=True)
