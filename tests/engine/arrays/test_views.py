"""Views of memory that was just read: the same numbers as if each were read, whatever was written in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, STATS, STD
from trainprobe.engine.tape import Tape

ROWS, COLUMNS = 512, 192
KINDS = (STATS, CHECKSUM, STATS | STD, STATS | CHECKSUM | CRC32)
VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "shapes": lambda x: [x.view(-1), x.reshape(16, -1, COLUMNS), x[:], x.unsqueeze(1)],
    "transposed": lambda x: [x.t(), x.t().t(), x.view(ROWS // 2, 2, COLUMNS).permute(2, 0, 1)],
    "parts": lambda x: [*x.chunk(2), *x.split(COLUMNS // 2, dim=1), x.view(ROWS, 2, -1).transpose(0, 1)[0], x[: ROWS // 2]],
    "repeated": lambda x: [x.expand(3, ROWS, COLUMNS), x.expand(2, ROWS, COLUMNS), x.expand(2, ROWS, COLUMNS)[0]],
    "steps": lambda x: [x[::2], x[1::2], x[::2].contiguous(), x.as_strided((ROWS // 2, COLUMNS), (2 * COLUMNS, 1))],
    "other elements": lambda x: [x.view(torch.int32), x.view(torch.uint8), x.view(torch.float32)],
    "shared without a base": lambda x: [x.data, x.detach(), x.detach().view(-1)],
}


def tape(reuse: bool = True) -> Tape:
    return Tape(TorchLibrary(), reuse=reuse)


def numbers(one: Tape, *values: Any, kinds: int = STATS) -> list[Any]:
    """The bits of what was read, of each value."""
    partials, sums, crcs = one._stats_rows[kinds][0].drain()
    return [(partials[v.row].tobytes(), *(None if told is None else told[v.row] for told in (sums, crcs))) for v in values]


def afresh(t: Tensor, kinds: int = STATS) -> Any:
    one = tape(reuse=False)
    return numbers(one, one.value(t, kinds), kinds=kinds)[0]


def reads(one: Tape) -> int:
    """How many looks were answered without reading."""
    return int(one.native.reused)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_have_the_numbers_that_they_would_have_alone(name: str, kinds: int) -> None:
    x = torch.randn(ROWS, COLUMNS)
    one, views = tape(), VIEWS[name](x)
    looked = [one.value(t, kinds) for t in (x, *views, x)]
    assert numbers(one, *looked, kinds=kinds) == [afresh(t, kinds) for t in (x, *views, x)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_views_of_every_kind_of_element(dtype: torch.dtype) -> None:
    x = (torch.randn(ROWS, 2 * COLUMNS) * 10).to(dtype)
    one, views = tape(), [x.view(-1), x.t(), x.conj()]
    looked = [one.value(t, STATS) for t in (x, *views)]
    assert numbers(one, *looked) == [afresh(t) for t in (x, *views)]


def test_a_view_of_what_was_just_read_is_not_read_again() -> None:
    x, one = torch.randn(ROWS, COLUMNS), tape()
    one.value(x, STATS)
    before = reads(one)
    for view in (x.view(-1), x.t(), x.unsqueeze(0), *x.view(-1).chunk(1)):
        one.value(view, STATS)
    assert reads(one) - before == 4
    one.value(x.t(), CHECKSUM)  # which knows the place of each element, and other kinds than were read
    one.value(x[: ROWS // 2], STATS)
    one.value(torch.randn(8).view(2, 4), STATS)
    assert reads(one) - before == 4


@pytest.mark.parametrize("write", ["to itself", "through a view", "through its base", "past its counter"])
def test_what_was_written_in_between_is_read(write: str) -> None:
    base = torch.randn(2 * ROWS, COLUMNS)
    x, one = base[:ROWS], tape()
    first = one.value(x.view(-1), STATS)
    was = afresh(x)
    if write == "to itself":
        x.mul_(2)
    elif write == "through a view":
        base.view(-1)[:7].add_(1)
    elif write == "through its base":
        base.mul_(2)
    else:  # as a kernel does that takes an address
        now = torch.randn(ROWS, COLUMNS)
        ctypes.memmove(x.data_ptr(), now.data_ptr(), now.nbytes)
    second = one.value(x.t(), STATS)
    assert afresh(x) != was
    assert numbers(one, first, second) == [was, afresh(x)]


def test_an_address_that_is_used_again_is_read_again() -> None:
    memory = np.random.default_rng(0).standard_normal(ROWS * COLUMNS).astype(np.float32)
    one, x = tape(), torch.from_numpy(memory)
    one.value(x.view(ROWS, COLUMNS), STATS)
    before = reads(one)
    del x
    memory[5] = 100.0  # which the sample may not meet
    again = torch.from_numpy(memory)
    last = one.value(again.view(ROWS, COLUMNS), STATS)
    assert reads(one) == before
    assert numbers(one, last) == [afresh(again)]


@pytest.mark.parametrize("forget", ["touched", "forget_all"])
def test_what_the_tape_forgets_is_read_again(forget: str) -> None:
    x, one = torch.randn(ROWS, COLUMNS), tape()
    one.value(x, STATS)
    x.data[3, 3] = 100.0
    one.touched(x.view(-1)) if forget == "touched" else one.forget_all()
    last = one.value(x.view(-1), STATS)
    assert numbers(one, last) == [afresh(x)]


def test_only_the_latest_are_remembered_and_nothing_is_kept_alive() -> None:
    one, kept = tape(), [torch.randn(ROWS, COLUMNS) for _ in range(40)]
    looked = [one.value(x, STATS) for x in kept]
    looked += [one.value(x.view(-1), STATS) for x in reversed(kept)]
    assert 0 < reads(one) < len(kept)
    expected = [afresh(x) for x in kept]
    assert numbers(one, *looked) == [*expected, *reversed(expected)]
    alive, one = torch.randn(ROWS, COLUMNS), tape()
    gone = WeakTensorKeyDictionary()
    gone[alive] = 1
    one.value(alive.view(-1), STATS)
    del alive
    assert not list(gone.keys())


def test_inference_tensors_which_have_no_counter_are_read_each_time() -> None:
    with torch.inference_mode():
        x, one = torch.randn(ROWS, COLUMNS), tape()
        one.value(x, STATS)
        x[0, 0] = 100.0
        last = one.value(x.view(-1), STATS)
        assert numbers(one, last) == [afresh(x)]
        assert not reads(one)
