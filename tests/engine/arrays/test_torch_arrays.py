"""The row buffer: order, devices, tensors without statistics, threads, forks and what it leaves alone."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading

import numpy as np
import pytest
import torch
from reduction_oracle import IMPLEMENTATIONS, sample

from trainprobe.engine.arrays import torch_arrays
from trainprobe.engine.arrays.torch_arrays import (
    CHECKSUM,
    CRC32,
    STATS,
    STD,
    SUBNORMAL,
    TorchStatsRows,
    copy_out,
    local_of,
    native_in_use,
)
from trainprobe.engine.arrays.torch_reduce import REDUCED

native_only = pytest.mark.skipif(not native_in_use(), reason="the extension is not built")
EVERYTHING = STATS | CHECKSUM | STD | CRC32


def drain(t: torch.Tensor, flags: int = EVERYTHING) -> tuple[bytes, list[int], list[int]]:
    stats_rows = TorchStatsRows(flags)
    stats_rows.add(t)
    partials, sums, crcs = stats_rows.drain()
    assert sums is not None and crcs is not None
    return partials.tobytes(), sums.tolist(), crcs


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_rows_are_numbered_in_the_order_of_adding(native: bool) -> None:
    stats_rows = TorchStatsRows(STATS, native=native)
    assert [stats_rows.add(torch.full((3,), float(i))) for i in range(1200)] == list(range(1200))
    assert len(stats_rows) == 1200
    assert stats_rows.drain()[0][:, 7].tolist() == [3.0 * i for i in range(1200)]


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_draining_starts_anew(native: bool) -> None:
    stats_rows = TorchStatsRows(STATS, native=native)
    stats_rows.add(torch.ones(2))
    stats_rows.drain()
    assert stats_rows.drain()[0].shape == (0, 12)
    assert stats_rows.add(torch.ones(4)) == 0
    assert stats_rows.drain()[0][0, 0] == 4


@pytest.mark.parametrize(("alone", "together"), [(0, 600), (300, 400), (511, 2)])
def test_tensors_that_are_added_together_have_their_own_rows_wherever_the_first_one_stands(alone: int, together: int) -> None:
    stats_rows = TorchStatsRows(STATS, native=False)
    tensors = [torch.full((3,), float(i)) for i in range(alone + together)]
    for t in tensors[:alone]:
        stats_rows.add(t)
    stats_rows.add_all(tensors[alone:], range(alone, len(tensors)))
    assert stats_rows.drain()[0][:, 7].tolist() == [3.0 * i for i in range(len(tensors))]


def test_rows_by_the_kernel_and_by_torch_stand_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stats_rows = TorchStatsRows(STATS | CHECKSUM)
    stats_rows.add(torch.tensor([1.0]))
    stats_rows._add_by_torch(torch.tensor([2.0]))
    stats_rows.add(torch.tensor([3.0]))
    partials, sums, crcs = stats_rows.drain()
    assert partials[:, 7].tolist() == [1, 2, 3]
    assert crcs is None and sums is not None and len(set(sums.tolist())) == 3


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "layout"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout"),
        (lambda: torch.eye(3).to_mkldnn(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: _freed(), "freed"),
        pytest.param(
            lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "float4",
            marks=pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch before 2.8 has no float4"),
        ),
    ],
    ids=["meta", "coo", "csr", "mkldnn", "quantized", "nested", "freed", "float4"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_statistics_is_refused_with_the_reason(native: bool, make: object, why: str) -> None:
    stats_rows, t = TorchStatsRows(EVERYTHING, native=native), make()  # type: ignore[operator]
    assert stats_rows.add(t) == -1
    assert why in stats_rows.refusal(t)
    assert len(stats_rows) == 0


def _freed() -> torch.Tensor:
    t = torch.randn(1000)[500:]
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_torch_func_wrappers_are_refused_by_name(native: bool) -> None:
    said: list[tuple[int, str]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        stats_rows = TorchStatsRows(STATS, native=native)
        said.append((stats_rows.add(x), stats_rows.refusal(x)))
        return x.sum()

    torch.vmap(look)(torch.ones(3, 2))
    torch.func.grad(look)(torch.ones(3))
    assert [row for row, _ in said] == [-1, -1]
    assert "BatchedTensor" in said[0][1] and "GradTrackingTensor" in said[1][1]


def test_a_fake_tensor_is_described_and_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        t = torch.ones(3)
    inner, kind, _, note = local_of(t)
    assert (inner, kind) == (None, "torch._subclasses.fake_tensor.FakeTensor") and note


def test_a_jagged_tensor_gives_its_values() -> None:
    t = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    inner, kind, _, note = local_of(t)
    assert inner is not None and inner.shape == (5,) and note is None and kind.endswith("NestedTensor")


def test_a_subclass_with_its_own_data_is_reduced_as_it_is() -> None:
    class Tagged(torch.Tensor):
        pass

    t = torch.ones(3).as_subclass(Tagged)
    inner, kind, _, _ = local_of(t)
    assert inner is t and kind.endswith("Tagged") and TorchStatsRows(STATS).add(t) == 0


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_adding_changes_neither_the_tensor_nor_the_graph_nor_the_random_state(native: bool) -> None:
    x = torch.randn(40, 50, requires_grad=True)
    y = (x * 2).t()
    bits, version, state, node = y.detach().clone(), y._version, torch.get_rng_state(), y.grad_fn
    TorchStatsRows(EVERYTHING, native=native).add(y)
    assert torch.equal(y, bits) and y._version == version and y.grad_fn is node
    assert torch.equal(torch.get_rng_state(), state)


@native_only
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("name", ["baseline", "avx2"])
def test_numbers_do_not_depend_on_the_instruction_set(dtype: torch.dtype, name: str) -> None:
    native = torch_arrays._native
    long, wide = sample(dtype, 70001), sample(dtype, 130, 70)
    several = [long, long[:1], long[5:38], long[::3], wide.t(), wide[:, 3:66]]
    before = native.instruction_set()
    if dtype.is_floating_point and dtype.itemsize > 1:
        wide[::7, ::5], wide[::11, ::3] = float("nan"), float("inf")
    first = [drain(t, EVERYTHING | SUBNORMAL) for t in several]
    try:
        native.use(name)
    except ValueError:
        pytest.skip(f"this machine has no {name}")
    try:
        assert [drain(t, EVERYTHING | SUBNORMAL) for t in several] == first
    finally:
        native.use(before)


@native_only
@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.t(), lambda t: t[:, 1:]], ids=["contiguous", "transposed", "sliced"])
def test_numbers_do_not_depend_on_the_number_of_threads(make: object) -> None:
    native = torch_arrays._native
    t = make(torch.randn(900, 1001))  # type: ignore[operator]
    before = native.get_threads()
    try:
        answers = []
        for n in (1, 2, 5):
            native.set_threads(n)
            answers.append(drain(t))
    finally:
        native.set_threads(before)
    assert answers[0] == answers[1] == answers[2]


def _child(queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    queue.put(drain(torch.arange(500_000, dtype=torch.float32))[1:])


@native_only
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reduces_with_threads_of_its_own() -> None:
    native = torch_arrays._native
    before = native.get_threads()
    native.set_threads(2)
    try:
        want = drain(torch.arange(500_000, dtype=torch.float32))[1:]
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_child, args=(queue,))
        child.start()
        assert queue.get(timeout=60) == want
        child.join(60)
        assert child.exitcode == 0
    finally:
        native.set_threads(before)


@native_only
def test_row_buffers_of_several_python_threads_do_not_disturb_each_other() -> None:
    native = torch_arrays._native
    before = native.get_threads()
    native.set_threads(2)
    tensors = [torch.full((400_000,), float(i)) for i in range(4)]
    sums: dict[int, list[float]] = {}

    def work(i: int) -> None:
        stats_rows = TorchStatsRows(STATS)
        for _ in range(10):
            stats_rows.add(tensors[i])
        sums[i] = stats_rows.drain()[0][:, 7].tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    native.set_threads(before)
    assert sums == {i: [400_000.0 * i] * 10 for i in range(4)}


def test_copy_out_holds_the_elements_in_row_major_order() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for t in (x, x.t(), x[:, 1:], torch.zeros(0, 2), torch.randn(2000, 50)):
        copy = copy_out(t)
        assert (copy.dtype, copy.shape) == ("torch.float32", tuple(t.shape))
        assert np.array_equal(np.frombuffer(copy.data, np.float32).reshape(copy.shape), t.detach().numpy())


def test_copy_out_does_not_follow_what_is_written_later() -> None:
    x = torch.ones(5)
    copy = copy_out(x)
    x.zero_()
    assert np.frombuffer(copy.data, np.float32).tolist() == [1.0] * 5


def test_copy_out_resolves_conjugates() -> None:
    assert np.frombuffer(copy_out(torch.tensor([1 + 2j]).conj()).data, np.complex64).tolist() == [1 - 2j]


@native_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for memory at an address")
def test_memory_at_a_low_address_is_reduced_by_the_compiled_kernel() -> None:
    """Of a Python that is no position-independent program the heap lies there, and small tensors in it."""
    mapped = ctypes.CDLL(None, use_errno=True).mmap
    mapped.restype, mapped.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = mapped(1 << 35, 4096, 3, 0x100022, -1, 0)  # private, anonymous, fixed where nothing is
    assert address == 1 << 35, "this address is taken"
    t = torch.frombuffer((ctypes.c_float * 4).from_address(address), dtype=torch.float32)
    t.copy_(torch.tensor([1.0, 2.0, 3.0, -4.0]))
    rows = TorchStatsRows(STATS)
    rows.add(t)
    assert rows._devices == {}, "torch's operations have reduced it"
    assert rows.drain()[0][0][:8].tolist() == [4.0, 0.0, 0.0, 0.0, 0.0, -4.0, 3.0, 2.0]
    assert bytes(copy_out(t).data) == t.numpy().tobytes()
