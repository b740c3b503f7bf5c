"""One small GLM-like model in PyTorch and in MindSpore: their dumps agree within rounding; what is planted is named first."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import mindspore as ms
import pytest
import yaml
from mindspore.ops import operations
from mindspore.ops.auto_generate import gen_ops_prim

from tests.mindspore import glm_mindspore
from tests.mindspore.launch import ENVIRONMENT
from trainprobe.cli import main
from trainprobe.dump_compare import frameworks

ROOT = Path(__file__).parents[2]
TORCH = Path(os.environ.get("TRAINPROBE_TORCH_PYTHON", ROOT / ".venv/bin/python"))
PLANS = {"mix": {"level": "mix", "task": "tensor"}, "L0": {"level": "L0"}, "L1": {"level": "L1"}}
TABLE = yaml.safe_load((Path(frameworks.__file__).parent / "op_names.yaml").read_text(encoding="utf-8"))


def plan(folder: Path, name: str, **fields: object) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"step": [0], "on_error": "raise", "console": False, "output": str(folder / name), **fields}))
    return str(path)


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of the model in PyTorch, by level, made in an environment that holds it; and its weights, `weights.pt`."""
    if not TORCH.exists():
        pytest.skip(f"no Python with PyTorch at {TORCH}: name one in TRAINPROBE_TORCH_PYTHON")
    folder = tmp_path_factory.mktemp("torch")
    calls = [f"main({plan(folder, level, **fields)!r}, {str(folder / 'weights.pt')!r})" for level, fields in PLANS.items()]
    code = "from tests.mindspore.glm_torch import main; " + "; ".join(calls)
    done = subprocess.run(
        [TORCH, "-c", code], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("level", PLANS)
def test_a_healthy_pair_agrees_within_rounding(level: str, of_torch: Path, tmp_path: Path) -> None:
    glm_mindspore.main(plan(tmp_path, level, **PLANS[level]))
    for sides in ((of_torch / level, tmp_path / level), (tmp_path / level, of_torch / level)):
        result = tmp_path / "result.json"
        assert main(["dump-compare", *map(str, sides), "--json", str(result), "-q"]) == 1
        compared = json.loads(result.read_text())
        outcomes = {call["verdict"] for call in compared["calls"]}
        assert outcomes <= {"identical", "rounding", "carried"}
        names = [call["a"] for call in compared["calls"]]
        kinds = {"L0": (".forward.", ".backward.", ".parameters_grad."), "L1": (".forward", ".backward")}.get(level, ())
        assert all(any(kind in name for name in names) for kind in kinds)
        assert len(names) > 50


@pytest.mark.parametrize("level", ["mix", "L0"])
def test_a_wrong_weight_gradient_of_one_column_parallel_linear_is_named_first(
    level: str, of_torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    glm_mindspore.main(plan(tmp_path, level, **PLANS[level]), planted="layers.1.mlp.dense_h_to_4h.weight")
    capsys.readouterr()
    assert main(["dump-compare", str(of_torch / level), str(tmp_path / level)]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert "layers.1.mlp.dense_h_to_4h.ColumnParallelLinear.parameters_grad.0" in first
    assert "weight is" in first


PLANTED = {  # what is wrong in MindSpore → (the cell, how its construct is changed, what the first line names)
    "scale of attention": ("Attention", "layers.0.attention"),
    "activation": ("MLP", "layers.0.mlp"),
    "epsilon of a norm": ("RMSNorm", "layers.0.input_norm"),
    "a residual is left out": ("Layer", "layers.0"),
}


@pytest.mark.parametrize("wrong", PLANTED)
def test_a_wrong_calculation_is_named_where_it_is(
    wrong: str, of_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell, where = PLANTED[wrong]
    monkeypatch.setattr(getattr(glm_mindspore, cell), "construct", WRONG[wrong])
    glm_mindspore.main(plan(tmp_path, "mix", **PLANS["mix"]))
    capsys.readouterr()
    assert main(["dump-compare", str(of_torch / "mix"), str(tmp_path / "mix")]) == 2
    told = capsys.readouterr().out.splitlines()
    assert any(where in line for line in told[:2]), told[:3]


def _scale(self, x, mask):
    return _attention(self, x, mask, scale=1.0)


def _attention(self, x, mask, scale):
    batch, heads, width, length = x.shape[0], glm_mindspore.HEADS, glm_mindspore.WIDTH, glm_mindspore.LENGTH
    q, k, v = (
        part.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)
        for part in ms.ops.chunk(self.query_key_value(x), 3, -1)
    )
    scores = ms.ops.softmax(ms.ops.matmul(q, k.transpose(0, 1, 3, 2)) * scale + mask, -1)
    return self.dense(ms.ops.matmul(scores, v).transpose(0, 2, 1, 3).reshape(batch, length, width))


def _activation(self, x):
    gate, up = ms.ops.chunk(self.dense_h_to_4h(x), 2, -1)
    return self.dense_4h_to_h(ms.ops.gelu(gate) * up)


def _epsilon(self, x):
    return x * ms.ops.rsqrt(ms.ops.mean(x * x, -1, True) + 1e-2) * self.weight


def _no_residual(self, x, mask):
    x = self.attention(self.input_norm(x), mask)
    return x + self.mlp(self.post_norm(x))


WRONG = {
    "scale of attention": _scale,
    "activation": _activation,
    "epsilon of a norm": _epsilon,
    "a residual is left out": _no_residual,
}


@pytest.mark.parametrize("common", TABLE)
def test_the_names_of_ops_are_those_of_mindspore(common: str) -> None:
    row = TABLE[common]
    modules = (ms.ops, ms.mint, ms.mint.nn.functional)
    assert all(hasattr(gen_ops_prim, name) or hasattr(operations, name) for name in row["primitive"])
    assert all(any(hasattr(module, name) for module in modules) for name in row["functional"])
    assert all(hasattr(ms.Tensor, name) for name in row.get("method", ()))
    assert {frameworks.common_name(f"Primitive.{name}") for name in row["primitive"]} == {common}
