"""One projection for query, key and value in PyTorch, three in MindSpore: they belong together by input and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from tests.mindspore import glm_mindspore
from tests.mindspore.glm_numbers import HEADS, LENGTH, WIDTH, weights
from tests.mindspore.test_across_frameworks import PLANS, of_torch, plan
from trainprobe.cli import main

__all__ = ["of_torch"]  # the fixture
PARTS = ("query", "key", "value")


class Apart(nn.Cell):
    """Attention with a projection each."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Dense(WIDTH, WIDTH) for _ in PARTS)
        self.dense = nn.Dense(WIDTH, WIDTH, has_bias=False)

    def construct(self, x, mask):
        q, k, v = (
            part.reshape(x.shape[0], LENGTH, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        scores = ops.softmax(ops.matmul(q, k.transpose(0, 1, 3, 2)) * (WIDTH // HEADS) ** -0.5 + mask, -1)
        return self.dense(ops.matmul(scores, v).transpose(0, 2, 1, 3).reshape(x.shape[0], LENGTH, WIDTH))


def split_weights() -> dict[str, np.ndarray]:
    """Return the weights of the model with those of its one projection apart."""
    found: dict[str, np.ndarray] = {}
    for name, array in weights().items():
        if ".query_key_value." in name:
            found |= {name.replace("query_key_value", part): each for part, each in zip(PARTS, np.split(array, 3), strict=True)}
        else:
            found[name] = array
    return found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glm_mindspore, "Attention", Apart)
    monkeypatch.setattr(glm_mindspore, "weights", split_weights)


def compared(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[dict]]:
    capsys.readouterr()
    result = a.parent / "result.json"
    code = main(["dump-compare", str(a), str(b), "--json", str(result)])
    return code, capsys.readouterr().out, json.loads(result.read_text())["calls"]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_projections_belong_to_the_one_that_is_all_of_them(
    level: str, of_torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    glm_mindspore.main(plan(tmp_path, level, **PLANS[level]))
    name = "layers.0.attention.query+key+value"
    for sides in ((of_torch / level, tmp_path / level), (tmp_path / level, of_torch / level)):
        code, said, calls = compared(*sides, capsys)
        assert code == 1, said
        assert f"the first layers.0.attention.query_key_value and {name}" in said or f"the first {name} and" in said, said
        fused = [call for call in calls if ".query+key+value." in f"{call['a']} {call['b']}"]
        assert {call["paired_by"] for call in fused} == {"sizes that add up"}
        kinds = {call["a"].rsplit(".", 2)[1] for call in fused}
        assert kinds >= {"forward", "backward", "parameters_grad"}, kinds
        assert "missing" not in {call["verdict"] for call in calls}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("planted", ["layers.1.attention.key.weight", "layers.0.attention.value.bias"])
def test_a_wrong_gradient_of_one_of_them_is_named(
    planted: str, of_torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    glm_mindspore.main(plan(tmp_path, "L0", **PLANS["L0"]), planted=planted)
    code, said, _ = compared(of_torch / "L0", tmp_path / "L0", capsys)
    first = said.splitlines()[0]
    assert code == 2, said
    assert f"{planted[:8]}.attention.query+key+value" in first, first
    assert f"{planted.rpartition('.')[2]} is at least" in first, first


@pytest.mark.usefixtures("apart")
def test_a_wrong_result_of_one_of_them_is_named(
    of_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Apart):
        def __init__(self) -> None:
            super().__init__()
            self.value.register_forward_hook(lambda cell, given, made: made * ms.Tensor(1.01, ms.float32))

    monkeypatch.setattr(glm_mindspore, "Attention", Wrong)
    glm_mindspore.main(plan(tmp_path, "L0", **PLANS["L0"]))
    code, said, _ = compared(of_torch / "L0", tmp_path / "L0", capsys)
    assert code == 2, said
    assert "layers.0.attention.query+key+value" in said.splitlines()[0], said
