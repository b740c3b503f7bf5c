"""What the compiled tape records of a tensor is what the tensor's attributes say."""

from __future__ import annotations

import pytest
import torch

from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, STATS
from trainprobe.engine.tape import Tape

FLAGS = STATS | CHECKSUM | CRC32


def tensors():
    torch.manual_seed(0)
    base = torch.randn(4, 5, 6)
    z = torch.complex(base, base.flip(0))
    yield "contiguous", base
    yield "scalar", torch.tensor(3.5)
    yield "empty", torch.empty(0, 3)
    yield "transposed", base.transpose(0, 2)
    yield "sliced", base[1:, ::2, 3]
    yield "expanded", torch.randn(1, 5).expand(7, 5)
    yield "of one element and odd strides", base[2:3, 1:2, ::6]
    yield "needs a gradient", torch.randn(3, requires_grad=True)
    yield "parameter", torch.nn.Parameter(torch.randn(3, 2))
    yield "conjugate", z.conj()
    yield "negative", z.conj().imag
    yield "inference", made_in_inference()
    for name in ("bool", "uint8", "int16", "int64", "uint32", "float16", "bfloat16", "float64"):
        yield name, (base * 10).to(getattr(torch, name))
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        if hasattr(torch, name):
            yield name, base.abs().to(getattr(torch, name))


def made_in_inference():
    with torch.inference_mode():
        return torch.randn(3, 3)


@pytest.mark.parametrize(("name", "t"), list(tensors()), ids=[name for name, _ in tensors()])
def test_a_value_is_what_the_tensors_own_attributes_say(name, t):
    rows = {}
    for eyed in (True, False):
        tape = Tape(TorchLibrary())
        value = tape.value(t, FLAGS) if eyed else tape._look(t, FLAGS)  # which asks the attributes, and torch_arrays reduces
        partials, sums, crcs = tape._stats_rows[FLAGS][0].drain()
        about = (value.dtype, tuple(value.shape), value.type, value.device, value.requires_grad)
        rows[eyed] = (about, partials.tobytes(), sums.tolist(), dict(crcs) if isinstance(crcs, dict) else list(crcs or ()))
    assert rows[True] == rows[False]
    assert rows[True][0][1] == tuple(t.shape)


def test_a_value_is_seen_once():
    tape = Tape(TorchLibrary())
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    values = [tape.value(t, STATS) for t in (first, second, first)]
    assert values[0].shape == values[1].shape and values[0] is not values[1]
    assert values[0] is values[2]
    first.add_(1)
    assert tape.value(first, STATS) is not values[0]


def test_a_tensor_that_takes_on_another_shape_is_looked_at_anew():
    tape = Tape(TorchLibrary())
    t = torch.randn(6)
    before = tape.value(t, STATS)
    t.unsqueeze_(0)
    after = tape.value(t, STATS)
    assert (tuple(before.shape), tuple(after.shape)) == ((6,), (1, 6))


def test_a_tensor_inside_a_transform_is_no_matter_for_the_compiled_parts():
    tape = Tape(TorchLibrary())
    seen = []

    def doubled(x):
        seen.append(tape.value(x, STATS))
        return 2 * x

    torch.func.vmap(doubled)(torch.ones(3, 2))
    assert len(seen) == 1
