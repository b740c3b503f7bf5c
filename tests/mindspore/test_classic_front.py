"""The classic front under MindSpore: a loop that is written out, a Model with its callback, and the same bits without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.mindspore.tiny import BATCH, PYNATIVE, Data, Loss, Net, train
from trainprobe.errors import UsageError
from trainprobe.mindspore import MsprobeInitStep, MsprobeStep, PrecisionDebugger, seed_all


@pytest.fixture
def config(tmp_path):
    """Write a config.json; end the process's debugger afterwards."""

    def write(**keys: Any) -> str:
        path = tmp_path / "config.json"
        settings = {"task": "statistics", "dump_path": str(tmp_path / "out"), "level": "L0", "risk_level": "ALL", "step": [1]}
        path.write_text(json.dumps({**settings, **keys}))
        return str(path)

    yield write
    PrecisionDebugger.close()


def entries(folder: Path, step: int, name: str = "dump.json") -> dict[str, Any]:
    return json.loads((folder / f"out/step{step}/rank0/{name}").read_text())["data"]


def loop(debugger: Any = None, steps: int = 2, save: bool = False) -> list[bytes]:
    """Train a step at a time, and return the bits of the parameters."""
    ms.set_context(mode=PYNATIVE)
    seed_all(7)
    net, entropy = Net(), Loss()
    net.set_train()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    forward = ms.value_and_grad(lambda x, y: entropy(net(x), y), None, optimizer.parameters)
    x = ms.Tensor(Data().x[:BATCH])
    for _ in range(steps):
        if debugger is not None:
            debugger.start(net)
        loss, gradients = forward(x, (x + 1) % 11)
        if save:
            debugger.save(loss, "loss")
        if debugger is not None:
            debugger.stop()
            debugger.step()
        optimizer(gradients)
    return [p.asnumpy().tobytes() for p in net.get_parameters()]


def test_a_loop_is_recorded_and_its_bits_stay(config, tmp_path):
    bare = loop()
    assert loop(PrecisionDebugger(config())) == bare
    PrecisionDebugger.close()
    names = list(entries(tmp_path, 1))
    assert {"Cell.head.Dense.forward.0", "Cell.head.Dense.backward.0", "Cell.blocks.0.up.Dense.forward.0"} <= set(names)
    assert not (tmp_path / "out/step0").exists()


def test_a_saved_value_is_recorded(config, tmp_path):
    loop(PrecisionDebugger(config(level="debug")), save=True)
    PrecisionDebugger.close()
    assert entries(tmp_path, 1, "debug.json")["loss.0.debug"]["Norm"] > 0


def test_the_callback_of_a_model_records_its_steps(config, tmp_path):
    bare = train(PYNATIVE)
    on = train(PYNATIVE, [MsprobeStep(PrecisionDebugger(config())), MsprobeInitStep()])
    PrecisionDebugger.close()
    assert on.bits == bare.bits
    assert "Cell.head.Dense.forward.0" in entries(tmp_path, 1)


def test_seed_all_repeats_random_numbers_and_removes_dropout_on_request(monkeypatch):
    draws = []
    for seed in (3, 3, 4):
        seed_all(seed)
        draws.append((float(np.random.rand()), ms.ops.rand(2).asnumpy().tobytes()))
    assert draws[0] == draws[1] != draws[2]
    monkeypatch.setattr(nn.Dropout, "construct", nn.Dropout.construct)
    seed_all(3, rm_dropout=True)
    assert float(nn.Dropout(p=0.9).set_train()(ms.Tensor(np.ones(100, np.float32))).asnumpy().min()) == 1.0
    with pytest.raises(UsageError, match="is no seed"):
        seed_all(-1)


def test_what_cannot_be_had_is_a_sentence(config, capsys):
    debugger = PrecisionDebugger(config())
    debugger.start(Net(), token_range=[0, 1])
    debugger.register_custom_api(ms.ops, "relu")
    told = capsys.readouterr().err
    assert "start(token_range=): under MindSpore" in told
    assert "register_custom_api('relu'): under MindSpore" in told
    with pytest.raises(ImportError, match="the same JSON can be its plan"):
        from trainprobe.mindspore import TrainerMon  # noqa: F401
