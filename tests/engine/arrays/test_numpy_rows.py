"""Rows of host arrays without a tensor library: the same numbers and checksums as for the torch tensor of the same bits."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.engine.arrays.reduction_oracle import bits_of, sample
from tests.mindspore.shared_bits import NUMBERS, WORDS, torch_numbers
from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows, native_rows_in_use, reduce_row, refusal
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, PARTIALS, STATS, STD, SUBNORMAL

EVERYTHING = STATS | CHECKSUM | STD | CRC32 | SUBNORMAL
COMPILED = [
    pytest.param(True, id="native", marks=pytest.mark.skipif(not native_rows_in_use(), reason="the extension is not built")),
    pytest.param(False, id="numpy"),
]
NAMES = (
    *(
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ),
)
COUNTS = ("count", "nan", "posinf", "neginf", "zero", "min", "max", "exponent", "subnormal")


def odd(name: str) -> torch.Tensor:
    """Ordinary, zero, subnormal and non-finite elements of a dtype, in a shape with an odd number of elements."""
    dtype = getattr(torch, name)
    x = sample(dtype, 7, 11, seed=3)
    if dtype.is_floating_point:
        x[0, :6] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, torch.finfo(dtype).smallest_normal / 2], dtype=dtype)
    return x


def array_of(t: torch.Tensor) -> np.ndarray:
    """The same bits for NumPy; bfloat16 as two bytes, as MindSpore hands it out."""
    if t.dtype == torch.bfloat16:
        return bits_of(t).view(np.dtype("V2")).reshape(t.shape)
    return t.numpy()


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_same_torch_tensor(name: str, compiled: bool) -> None:
    tensors = [odd(name), sample(getattr(torch, name), 300, seed=1), sample(getattr(torch, name), 0), odd(name).reshape(-1)[7]]
    mine, theirs = NumpyStatsRows(EVERYTHING, compiled=compiled), TorchStatsRows(EVERYTHING)
    for t in tensors:
        assert mine.add(array_of(t), name) == theirs.add(t)
    rows, sums, crcs = mine.drain()
    want, want_sums, want_crcs = theirs.drain()
    assert sums is not None and want_sums is not None
    assert sums.tolist() == want_sums.tolist()
    assert crcs == want_crcs
    for column in COUNTS:
        at = PARTIALS.index(column)
        close = 2.0**-51 if name == "complex128" else 0.0  # a magnitude is rounded by whoever takes it
        assert rows[:, at] == pytest.approx(want[:, at], rel=close, abs=0.0, nan_ok=True), column
    for statistic, numbers in finish(rows, ("mean", "norm", "std")).items():
        expected = finish(want, (statistic,))[statistic]
        assert numbers == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True), statistic


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
def test_sums_of_numpy_hold_their_bound_against_exact_arithmetic(name: str) -> None:
    t = sample(getattr(torch, name), 4097, seed=9)
    row = dict(zip(PARTIALS, reduce_row(array_of(t), name, STATS).tolist(), strict=True))
    exact = t.double().tolist()
    loose = 2.0**-44 if name != "float64" else 2.0**-52
    assert abs(row["sum"] - math.fsum(exact)) <= loose * (
        math.fsum(map(abs, exact)) if name != "float64" else abs(math.fsum(exact))
    )
    assert abs(row["sumsq"] - math.fsum(x * x for x in exact)) <= 2 * loose * math.fsum(x * x for x in exact)


@pytest.mark.parametrize("compiled", COMPILED)
def test_whole_numbers_of_64_bits_are_added_exactly(compiled: bool) -> None:
    x = np.array([2**62, 2**62, 2**62, -7], np.int64)
    stats_rows = NumpyStatsRows(STATS, compiled=compiled)
    stats_rows.add(x, "int64")
    assert stats_rows.drain()[0][0, PARTIALS.index("sum")] == float(3 * 2**62 - 7)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_squares_beyond_the_range_of_float64_have_a_norm(scale: float, compiled: bool) -> None:
    x = np.array([3.0, 4.0]) * scale
    stats_rows = NumpyStatsRows(STATS, compiled=compiled)
    stats_rows.add(x, "float64")
    assert finish(stats_rows.drain()[0], ("norm",))["norm"][0] == pytest.approx(5 * scale, rel=1e-14)


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_view_is_read_in_its_own_order(compiled: bool) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    stats_rows = NumpyStatsRows(STATS | CHECKSUM, compiled=compiled)
    for view in (x.T, np.ascontiguousarray(x.T), x):
        stats_rows.add(view, "float32")
    rows, sums, _ = stats_rows.drain()
    assert sums is not None
    assert sums[0] == sums[1] != sums[2]
    assert rows[0].tobytes() == rows[1].tobytes()


@pytest.mark.parametrize("name", WORDS)
def test_what_the_mindspore_tests_hold_against_torch_is_what_torch_gives(name: str) -> None:
    told, now = json.loads(NUMBERS.read_text())[name], torch_numbers(name)
    assert (told["checksum"], told["crc32"]) == (now["checksum"], now["crc32"])
    columns = [[float.fromhex(x) for x in numbers["partials"]] for numbers in (told, now)]
    assert columns[0] == pytest.approx(columns[1], rel=2.0**-40, nan_ok=True)


def test_what_cannot_be_read_is_refused_with_a_reason() -> None:
    words = np.array(["a", "b"])
    assert "string" in refusal(words, "string")
    assert NumpyStatsRows(STATS, compiled=False).add(words, "string") == -1
    assert NumpyStatsRows(STATS).add(words, "string") == -1


def test_nothing_of_it_needs_torch() -> None:
    modules = "trainprobe.engine.arrays.numpy_rows, trainprobe.watching, trainprobe.integrations.session"
    code = f"import sys; import {modules}; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.strip() == "False"
