"""Every call that draws random numbers is counted, whoever holds the generator, and draws the same numbers as ever."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainprobe import ConfigChecker
from trainprobe.config_check.capture.random_functions import random_functions
from trainprobe.config_check.pack_reader import read_pack

READS = {"getstate", "get_state", "spawn", "bit_generator"}
KINDS = [random.Random, np.random.Generator, np.random.RandomState]
OF_ONE_DEVICE = {"miopen_rnn"}  # what nn.LSTM comes to on ROCm


def captured(path: Path, program: Any) -> dict[str, int]:
    """Return function → number of calls of a program that runs inside a capture."""
    ConfigChecker.apply_patches(on_error="raise", micro_steps=1)
    net = nn.Linear(2, 1)
    with ConfigChecker(net, output_zip_path=path, micro_steps=1, on_error="raise"):
        net(torch.zeros(1, 2))
        program()
    found: dict[str, int] = {}
    for call in read_pack(path).ranks[0].single["randomness"]["calls"]:
        if call["window"] == 0:
            name = f"{call['function']} {call['detail']}".rstrip()
            found[name] = found.get(name, 0) + call["count"]
    return found


def test_generators_of_one_s_own_are_counted_though_they_were_made_before(tmp_path):
    owned = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)

    def program() -> None:
        owned[0].random(), owned[0].uniform(0, 1), owned[0].shuffle([1, 2, 3])
        owned[1].random(), owned[1].integers(5), owned[1].integers(5)
        owned[2].rand(2), owned[2].permutation(4)
        np.random.default_rng(7).normal()

    assert captured(tmp_path / "pack.zip", program) == {
        **{f"random.Random.{name}": 1 for name in ("random", "uniform", "shuffle")},
        **{"numpy.random.Generator.random": 1, "numpy.random.Generator.integers": 2, "numpy.random.Generator.normal": 1},
        **{"numpy.random.RandomState.rand": 1, "numpy.random.RandomState.permutation": 1, "numpy.random.default_rng 7": 1},
    }


def test_generators_of_one_s_own_draw_the_same_numbers(tmp_path):
    def draw() -> list[Any]:
        python, new, old = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)
        items = list(range(9))
        python.shuffle(items)
        state = [python.getstate(), new.bit_generator.state, str(old.get_state())]
        return [
            items,
            python.gauss(0, 1),
            python.sample(range(50), 5),
            new.normal(size=4).tolist(),
            old.rand(3).tolist(),
            *state,
        ]

    found: list[Any] = []
    captured(tmp_path / "pack.zip", lambda: found.append(draw()))
    assert found == [draw()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_that_draws_is_watched_and_comes_back(kind):
    names = [n for n in dir(kind) if not n.startswith("_") and n not in READS and callable(getattr(kind, n))]
    before = {n: getattr(kind, n) for n in names}
    own = set(vars(kind))
    assert len(names) > 15
    ConfigChecker.apply_patches(on_error="raise")
    try:
        assert [n for n in names if getattr(getattr(kind, n), "__wrapped__", None) is not before[n]] == []
    finally:
        ConfigChecker.stop()
    assert {n: getattr(kind, n) for n in names} == before
    assert set(vars(kind)) == own


def test_every_torch_function_whose_operator_draws_is_watched():
    """The oracle is torch's own tag on its operators; those that begin with _ are steps inside of others."""
    operators = {s.name.partition("::")[2] for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}
    drawing = {name for name in operators if not name.startswith("_") and draws(name)}
    assert {"dropout", "randperm", "normal_", "lstm", "scaled_dot_product_attention"} <= drawing
    watched = {full for full, *_ in random_functions()}
    places = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.functional": nn.functional}
    missed = {
        f"{place}.{name}"
        for place, owner in places.items()
        for name in drawing - OF_ONE_DEVICE
        if callable(getattr(owner, name, None)) and f"{place}.{name}" not in watched
    }
    assert missed == set()


def draws(name: str) -> bool:
    packet = getattr(torch.ops.aten, name)
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads())


@pytest.mark.parametrize(("make", "name"), [(nn.LSTM, "torch.lstm"), (nn.GRU, "torch.gru"), (nn.RNN, "torch.rnn_tanh")])
def test_dropout_between_recurrent_layers_is_counted_and_no_other_call_of_them(tmp_path, make, name):
    def program() -> None:
        make(3, 4, num_layers=2, dropout=0.25)(torch.ones(5, 1, 3))
        make(3, 4, num_layers=2, dropout=0.25).eval()(torch.ones(5, 1, 3))
        make(3, 4, num_layers=1)(torch.ones(5, 1, 3))

    found = captured(tmp_path / "pack.zip", program)
    assert {k: n for k, n in found.items() if k.startswith(name)} == {f"{name} p=0.25": 1}


def test_names_of_temporary_files_are_no_random_calls_of_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "_name_sequence", None)  # so that its generator is made anew as well
    assert captured(tmp_path / "pack.zip", lambda: tempfile.NamedTemporaryFile(dir=tmp_path).close()) == {}


def test_a_type_that_cannot_be_written_to_is_told_in_the_pack(tmp_path, monkeypatch):
    monkeypatch.setattr("trainprobe.config_check.capture.patches.can_replace", lambda owner, name: False)
    captured(tmp_path / "pack.zip", lambda: None)
    notes = read_pack(tmp_path / "pack.zip").notes
    assert [n.split(" were")[0] for n in notes if "not counted" in n] == [
        f"calls of the methods of {kind}" for kind in ("numpy.random.Generator", "numpy.random.RandomState", "torch.Generator")
    ]
