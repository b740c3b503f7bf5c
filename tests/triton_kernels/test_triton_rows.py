"""Many tensors in one launch, places beyond 2^31, and when the kernels are believed. Their numbers: tests/engine/arrays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import trainprobe
from tests.engine.arrays import reduction_oracle as oracle
from tests.engine.arrays.reduction_oracle import Believed, assert_true, row_of, rows_of, sample
from trainprobe.engine.arrays import torch_arrays, triton_jobs, triton_kernels, triton_rows
from trainprobe.engine.arrays.torch_arrays import TorchStatsRows
from trainprobe.engine.core.records import StepData
from trainprobe.engine.stats.checksum import fingerprint
from trainprobe.engine.stats.partials import CHECKSUM, CHUNK, CHUNK_INTEGERS, STATS, STD, SUBNORMAL

HERE = torch.device("cpu")
ROOT = Path(__file__).parents[2]
ALL = STATS | CHECKSUM | STD | SUBNORMAL
SIZES = [0, 1, 127, 129, 1023, 1024, 1025, 2048, 3 * 1024 + 1]
DEVICE_SIZES = {name: getattr(triton_jobs, name) for name in ("_MERGE_LEVELS", "_PARTS")}


@pytest.fixture(autouse=True)
def kernels_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels have the host's tensors, with nothing proven yet."""
    monkeypatch.setattr(triton_rows, "DEVICES", {"cpu"})
    monkeypatch.setattr(triton_rows, "_trusts", {})
    for name, size in {"_MERGE_LEVELS": 3, "_PARTS": 8}.items():
        monkeypatch.setattr(triton_jobs, name, size)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tensors each launch reduced."""
    seen: list[int] = []
    original = triton_rows.launch

    def counted(jobs, *args) -> None:
        original(jobs, *args)
        seen.append(len(jobs))

    monkeypatch.setattr(triton_rows, "launch", counted)
    return seen


def strip(flags: int = ALL) -> TorchStatsRows:
    """A stats_rows whose tensors the compiled kernel leaves alone."""
    made = TorchStatsRows(flags, native=False)
    made._kernels = True
    return made


def test_tensors_taken_together_are_one_launch_a_dtype_and_each_has_the_bits_it_has_alone(launches: list[int]) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.float64)
    tensors = [sample(dtype, n, seed=n) for n in SIZES for dtype in dtypes]
    tensors += [sample(torch.float32, 40, 60).t(), sample(torch.bfloat16, 7, 9, 11, 3).permute(2, 0, 3, 1)[1:, :, 1:]]
    together, alone = rows_of("triton", ALL), rows_of("triton", ALL)
    together.add_all(tensors, range(len(tensors)))
    assert sorted(launches) == sorted([len(SIZES) + 1] * 2 + [len(SIZES)] * 2)
    for t in tensors:
        alone.add(t)
    assert launches[4:] == [1] * len(tensors)
    (rows, sums, _), (rows_alone, sums_alone, _) = together.drain(), alone.drain()
    assert rows.tobytes() == rows_alone.tobytes()
    assert sums is not None and sums_alone is not None and sums.tolist() == sums_alone.tolist()
    for row, total, t in zip(rows, sums.tolist(), tensors, strict=True):
        assert_true(row, t)
        assert total == fingerprint(oracle.bits_of(t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_with_the_sizes_of_a_device_the_bounds_hold(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    t = sample(dtype, (1 << 14) + 1500)
    made = rows_of("triton", ALL)
    for name, size in DEVICE_SIZES.items():
        monkeypatch.setattr(triton_jobs, name, size)
    assert made.add(t) == 0
    rows, sums, _ = made.drain()
    assert_true(rows[0], t)
    assert sums is not None and int(sums[0]) == fingerprint(oracle.bits_of(t))


def test_elements_beyond_2_to_the_31_are_found_and_have_their_place() -> None:
    whole = torch.empty((1 << 31) + 9, dtype=torch.uint8)  # the system gives a page when it is written
    far = whole[:: (1 << 31) + 5]
    far.copy_(torch.tensor([3, 250], dtype=torch.uint8))
    assert row_of(far, "triton")[[5, 6, 7]].tolist() == [3, 250, 253]

    near = sample(torch.float32, 700)
    chunks, chunk = 1 << 22, 1 << 10
    kind = triton_jobs.KINDS[torch.float32]
    start = chunks * chunk  # chunk number 2^22 of a tensor whose first elements nobody has
    for layout in ([1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 3, 3, 0, 0, 1, 1]):
        table = torch.tensor([-chunks, near.data_ptr() - 4 * start, start + 700, chunk, 1, 0, *layout])
        part = torch.zeros(len(CHUNK) + len(CHUNK_INTEGERS), dtype=torch.int64)
        constants = triton_jobs.chunk_constants(kind, CHECKSUM)
        triton_kernels.reduce_chunks[1,](table.data_ptr(), 1, part.data_ptr(), 1, **constants)
        assert int(part[len(CHUNK)]) % (1 << 64) == fingerprint(near.numpy(), index=start)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float64, torch.complex128], ids=str
)
def test_a_lane_adds_at_most_256_elements_and_many_programs_share_a_tensor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in DEVICE_SIZES.items():
        monkeypatch.setattr(triton_jobs, name, size)
    kind = triton_jobs.KINDS[dtype]
    lanes = 4 * triton_jobs.chunk_constants(kind, ALL)["rows"]
    for n in (0, 1, 1 << 16, 1 << 20, (1 << 27) + 1, 1 << 34):
        chunk = triton_jobs.chunk_of(n, kind)
        assert lanes <= chunk <= 256 * lanes <= 1 << 18
        assert chunk & (chunk - 1) == 0
        assert chunk == triton_jobs.chunk_of(0, kind) or n / chunk > 1024
        assert n / chunk <= 2048 or chunk == 256 * lanes


PACKED = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def heads(dtype: torch.dtype) -> torch.Tensor:
    """[n, 33, 64]: a whole chunk or more, and a rest that is no whole number of tiles."""
    return sample(dtype, triton_jobs.chunk_of(0, triton_jobs.KINDS[dtype]) // 2048 + 1, 33, 64)


def reduced(t: torch.Tensor) -> tuple[np.ndarray, int]:
    made = rows_of("triton", ALL)
    made.add(t)
    rows, sums, _ = made.drain()
    assert sums is not None
    return rows[0], int(sums[0])


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_the_bits_of_a_row_are_the_same_wherever_the_elements_lie(dtype: torch.dtype) -> None:
    plain = heads(dtype)
    n, many = plain.shape[0], plain.numel()
    row, total = reduced(plain)
    assert_true(row, plain)
    assert total == fingerprint(oracle.bits_of(plain))
    room = torch.empty(2 * many + 1, dtype=dtype)
    lying = {
        0: room[1 : 1 + many].view(n, 33, 64),  # 16 does not divide its address
        1: room[:-1].view(64, 33, n, 2)[..., 0].permute(2, 1, 0),
        2: room[:many].view(n, 33, 64),
        3: room[:-1].view(n, 33, 2, 64)[:, :, 1],
    }
    for mode, t in lying.items():
        t.copy_(plain)
        jobs = triton_rows.Jobs()
        assert jobs.add(t, 0) and jobs.table(triton_jobs.KINDS[dtype])[0][-1] == [mode]
        row_here, total_here = reduced(t)
        assert row_here.tobytes() == row.tobytes() and total_here == total, mode


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_what_is_not_finite_is_counted_in_the_first_tile_and_in_the_last(dtype: torch.dtype) -> None:
    plain = heads(dtype).reshape(-1)
    infinite = 448.0 if dtype == torch.float8_e4m3fn else torch.inf  # that has no infinities, and this is finite
    for place, what in ((0, torch.nan), (len(plain) - 1, -infinite), (slice(None), infinite)):
        t = plain.clone()
        t[place] = torch.tensor(what).to(dtype)
        row, total = reduced(t)
        assert_true(row, t)
        assert total == fingerprint(oracle.bits_of(t))


def test_the_first_step_is_reduced_by_torch_and_the_next_by_the_kernels_once_they_agree(launches: list[int]) -> None:
    t = sample(torch.bfloat16, 3000)
    first = strip()
    first.add(t)
    tried = list(launches)
    rows = first.drain()[0]
    assert tried == [triton_rows.SAMPLES, 1, 1] and len(rows) == 1
    assert triton_rows.trust_in(HERE).proven((torch.bfloat16, ALL)) and triton_rows.refusals() == []
    second = strip()
    second.add(t)
    assert launches == [*tried, 1]
    assert_true(second.drain()[0][0], t)
    assert not triton_rows.trust_in(HERE).known((torch.float32, ALL))


def test_five_permuted_dimensions_are_read_as_they_lie_or_copied(launches: list[int]) -> None:
    t = torch.randn(2, 3, 4, 3, 5).permute(3, 0, 2, 1, 4)
    jobs = triton_rows.Jobs()
    assert not jobs.add(t, 0) and jobs.add(t, 0, ordered=False)
    assert (jobs.addresses, jobs.counts, jobs.strided) == ([t.data_ptr()], [360], {})
    for flags in (STATS, STATS | CHECKSUM):
        made = rows_of("triton", flags)
        made.add(t)
        rows, sums, _ = made.drain()
        assert_true(rows[0], t)
        assert sums is None or int(sums[0]) == fingerprint(oracle.bits_of(t.contiguous()))
    assert launches == [1, 1]


def test_what_the_kernels_cannot_read_is_left_to_torch(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows_of("triton", STATS)
    odd = [torch.tensor([1 + 2j]).conj().imag, torch.arange(243.0).view(3, 3, 3, 3, 3)[::2, ::2, ::2, ::2, ::2]]
    monkeypatch.setattr(triton_rows, "_COPIED", 0)
    for t in odd:
        made.add(t)
    assert launches == []
    for row, t in zip(made.drain()[0], odd, strict=True):
        assert_true(row, t)


@pytest.mark.parametrize(("column", "name"), [(1, "nan"), (5, "min"), (7, "sum"), (9, "m2"), (12, "fingerprint")])
def test_kernels_that_disagree_are_refused_and_the_reason_names_the_number(
    column: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = triton_rows.launch

    def wrong(jobs, *args) -> None:
        original(jobs, *args)
        place = jobs.rows[0] + 8 * column
        number = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 1).from_address(place))
        number[0] ^= 1 << 40

    monkeypatch.setattr(triton_rows, "launch", wrong)
    t = sample(torch.float32, 3000)
    for _ in range(2):
        made = strip()
        made.add(t)
        assert_true(made.drain()[0][0], t)
    (why,) = triton_rows.refusals()
    assert f"torch.float32 they differ from torch's operations in {name}." in why


@pytest.mark.parametrize("fault", [RuntimeError("Failed to find C compiler"), ValueError("no such type"), OSError("no ptxas")])
def test_kernels_that_cannot_be_launched_are_refused(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args) -> None:
        raise fault

    monkeypatch.setattr(triton_rows, "launch", fails)
    made = strip()
    t = sample(torch.float32, 3000)
    made.add(t)
    assert_true(made.drain()[0][0], t)
    (why,) = triton_rows.refusals()
    assert str(fault) in why and "`native: false` in the plan" in why


def test_a_launch_of_many_that_fails_leaves_them_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows_of("triton", STATS)
    triton_rows._trusts[HERE].__class__ = type("Doubted", (Believed,), {"proven": lambda self, key: not self.refusal})

    def fails(*args) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(triton_rows, "launch", fails)
    tensors = [sample(torch.float32, n) for n in (5, 6000)]
    made.add_all(tensors, range(len(tensors)))
    for row, t in zip(made.drain()[0], tensors, strict=True):
        assert_true(row, t)
    assert "out of resources" in triton_rows.refusals()[0]


def test_the_plan_can_do_without_the_kernels() -> None:
    assert triton_rows.kernels_of(HERE) is not None
    plain = TorchStatsRows(STATS, native=False)
    plain.add(torch.ones(2))
    assert plain._devices[HERE]._kernels is None


SMALL = {"level": "off", "monitor": {"parameters": True, "gradients": True, "optimizer_state": True, "activations": True}}


def train(folder, monkeypatch: pytest.MonkeyPatch, **plan) -> tuple[list[torch.Tensor], list[StepData], trainprobe.Probe]:
    """Train a small model for three steps as if there were no compiled kernel; return its parameters, steps and probe."""
    monkeypatch.setattr(torch_arrays, "_native", None)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    collected_steps: list[StepData] = []
    with trainprobe.watch(model, optimizer, {**SMALL, **plan}, output=folder, sinks=["memory"], on_error="raise") as probe:
        for step in range(3):
            probe.begin_step(step)
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().sum().backward()
            optimizer.step()
            step_data = probe.end_step()
            assert step_data is not None
            collected_steps.append(step_data)
    return [p.detach().clone() for p in model.parameters()], collected_steps, probe


def test_a_training_whose_kernels_fail_says_so_once_and_goes_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _, quiet = train(tmp_path / "plain", monkeypatch, native=False)
    assert quiet.findings == []

    def fails(*args) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(triton_rows, "launch", fails)
    found, _, probe = train(tmp_path / "failing", monkeypatch)
    assert all(map(torch.equal, want, found))
    (finding,) = probe.findings
    assert (finding.rule, finding.severity) == ("kernels", "warning") and "no driver" in finding.message


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in accelerator is compiled with g++")
def test_a_training_is_reduced_by_the_kernels_and_its_parameters_together() -> None:
    """On the stand-in accelerator, whose memory the interpreter can read."""
    command = [sys.executable, "-m", "tests.triton_kernels.on_the_stand_in"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"bits": True, "together": True, "findings": [], "calls": True, "numbers": True}
