"""MindSpore tensors to numbers: those that PyTorch's library makes of the same bits."""

from __future__ import annotations

import json
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from tests.mindspore.shared_bits import NUMBERS, SHAPE, WORDS, bits
from trainprobe.engine.arrays.mindspore_library import MindSporeLibrary, copy_out
from trainprobe.engine.capture.mindspore.states import learning_rates, states_of
from trainprobe.engine.capture.mindspore.tape import HostTape
from trainprobe.engine.core.records import Opaque, Place
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, PARTIALS, STATS, STD, SUBNORMAL
from trainprobe.engine.tape import SAVE

EVERYTHING = STATS | CHECKSUM | STD | CRC32 | SUBNORMAL
EXACT = ("count", "nan", "posinf", "neginf", "zero", "min", "max", "exponent", "subnormal")


def tensor_of(name: str) -> Tensor:
    """A MindSpore tensor with these bits."""
    words = bits(name)
    if name == "bfloat16":
        exact = (words.view("u2").astype("u4") << 16).view(np.float32)
        return Tensor(exact).astype(ms.bfloat16)
    return Tensor(words.view(name if name != "bool" else np.bool_))


@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
@pytest.mark.parametrize("name", WORDS)
def test_numbers_are_those_of_torch_for_the_same_bits(name: str, native: bool) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    tape = HostTape(MindSporeLibrary(native), reuse=False)
    value = tape.tree(tensor_of(name), EVERYTHING)
    step_data = tape.drain(1, Place(), framework="mindspore", level="off", task="statistics")
    told = json.loads(NUMBERS.read_text())[name]
    assert value.dtype.lower() == name
    assert (value.shape, value.type, value.note) == (SHAPE, "mindspore.Tensor", None)
    assert step_data.checksums is not None and step_data.crc32 is not None
    row = dict(zip(PARTIALS, step_data.partials[value.row].tolist(), strict=True))
    want = dict(zip(PARTIALS, map(float.fromhex, told["partials"]), strict=True))
    assert {key: row[key] for key in EXACT} == {key: want[key] for key in EXACT}
    if row["nan"]:
        row["m2"] = want["m2"]  # not used where an element is not finite: the standard deviation is NaN
    assert row == pytest.approx(want, rel=1e-12)
    if name != "bfloat16":  # the cast that makes it may change the bits of a NaN
        assert f"{int(step_data.checksums[value.row]):016x}" == told["checksum"]
        assert int(step_data.crc32[value.row], 16) == told["crc32"]


def test_bfloat16_is_fingerprinted_by_its_bits() -> None:
    exact = np.arange(-20, 20, dtype=np.float32) / 4
    t = Tensor(exact).astype(ms.bfloat16)
    copy = copy_out(t)
    assert (copy.dtype, copy.shape) == ("BFloat16", (40,))
    assert copy.data == (exact.view("u4") >> 16).astype("u2").tobytes()


def test_views_scalars_parameters_and_nested_arguments() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    x = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    tape = HostTape(MindSporeLibrary(), reuse=False)
    saved: list[str] = []
    tape._save = lambda path, t, value, cut: saved.append(path)
    tree = tape.tree((x.T, [Tensor(2.5), Parameter(x, name="w")], {"k": None, "d": ms.float32}), EVERYTHING | SAVE, "at")
    step_data = tape.drain(1, Place(), framework="mindspore", level="off", task="statistics")
    view, (scalar, parameter), named = tree
    assert [v.shape for v in (view, scalar, parameter)] == [(4, 3), (), (3, 4)]
    assert step_data.checksums is not None
    assert step_data.checksums[view.row] != step_data.checksums[parameter.row]
    assert (parameter.requires_grad, scalar.requires_grad) == (True, None)
    assert saved == ["at.0", "at.1.0", "at.1.1"]
    assert named == {"k": None, "d": Opaque("mindspore.dtype", "Float32")}


def test_a_write_in_place_is_a_new_value() -> None:
    x = Parameter(Tensor(np.ones(3, np.float32)), name="x")
    tape = HostTape(MindSporeLibrary(), reuse=False)
    first = tape.tree(x, STATS)
    ms.ops.assign(x, x + 1)
    second = tape.tree(x, STATS)
    step_data = tape.drain(1, Place(), framework="mindspore", level="off", task="statistics")
    at = PARTIALS.index("sum")
    assert [step_data.partials[v.row, at] for v in (first, second)] == [3.0, 6.0]


def optimizers() -> list[tuple[Any, set[str]]]:
    """Each optimizer that has a CPU kernel, and what it keeps for a parameter; test_mindformers sees MindFormers' AdamW."""
    from mindspore.experimental import optim

    def net() -> list[Any]:
        return nn.Dense(3, 2).trainable_params()

    moments = {"exp_avg", "exp_avg_sq"}
    return [
        (nn.Adam(net(), 0.25), moments),
        (nn.AdamWeightDecay(net(), 0.25), moments),
        (nn.Momentum(net(), 0.25, 0.9), {"momentum_buffer"}),
        (nn.SGD(net(), 0.25, momentum=0.9), {"momentum_buffer", "stat"}),
        (nn.Adagrad(net(), learning_rate=0.25), {"accum"}),
        (optim.AdamW(net(), lr=0.25), {*moments, "max_exp_avg_sq"}),
    ]


def test_the_state_of_each_optimizer_is_found_by_parameter() -> None:
    for optimizer, slots in optimizers():
        found: dict[str, set[str]] = {}
        for name, slot, tensor in states_of(optimizer):
            found.setdefault(name, set()).add(slot)
            shape = next(p.shape for p in optimizer.parameters if p.name == name)
            assert tuple(tensor.shape) == tuple(shape), (type(optimizer), slot)
        assert found == {"weight": slots, "bias": slots}, type(optimizer)
        assert learning_rates(optimizer) == {"lr": 0.25}, type(optimizer)
