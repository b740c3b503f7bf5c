"""One small GLM-like model in PyTorch and in MindSpore: their dumps agree within rounding; what is planted is named first."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
import yaml
from mindspore.ops import operations
from mindspore.ops.auto_generate import gen_ops_prim

from tests.mindspore import glm_mindspore
from tests.mindspore.glm_numbers import losses, tokens
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


GUIDE = ROOT / "docs/moving_to_mindspore.md"
EXPECTED = {"config-check": {0}, "ckpt-compare": {0}, "dump-compare": {1}, "report": {0}, "judge": {0}}


def commands() -> list[list[str]]:
    """Return the commands of the guide, in order."""
    blocks = GUIDE.read_text(encoding="utf-8").split("<!-- run -->\n")[1:]
    return [line.split() for block in blocks for line in block.split("\n\n")[0].splitlines()]


def test_the_commands_of_the_guide_do_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not TORCH.exists():
        pytest.skip(f"no Python with PyTorch at {TORCH}: name one in TRAINPROBE_TORCH_PYTHON")
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    for name in ("config", "dump"):
        block = text.partition(f"`{name}_torch.yaml`")[2].split("\n\n")[1]
        plain = "\n".join(line.removeprefix("    ") for line in block.splitlines())
        for side in ("torch", "mindspore"):
            (tmp_path / f"{name}_{side}.yaml").write_text(plain.replace("_torch", f"_{side}"))
    verbs: list[str] = []
    for program, *words in commands():
        if program == "python":
            verbs.append(words[0])
            trains(words)
            continue
        verbs.append(words[0])
        if words[1] == "run_torch":
            of_torch_python("-m", "trainprobe", *words)
            continue
        assert main(words) in EXPECTED[words[0]], (words, capsys.readouterr())
    assert set(verbs) == {*EXPECTED, "train_torch.py", "train_mindspore.py"}
    told = capsys.readouterr().out
    assert "agrees within rounding: 165 calls" in told
    assert "identical: 18 weights tensors" in told
    assert "no difference found in what was captured" in told
    for wrong, says in (("rate", "learning rate differs: 0.1 and 0.2"), ("tokens", "x differs")):
        with monkeypatch.context() as patch:
            if wrong == "rate":
                patch.setattr(ms.nn, "SGD", partial(twice_the_rate, ms.nn.SGD))
            else:
                patch.setattr(glm_mindspore, "tokens", backwards)
            plan_of = {"output": wrong, "level": "off", "monitor": True, "config_check": {"micro_steps": 1}}
            glm_mindspore.main(plan_of)
        packs = (f"{run}/config_check_pack.zip" for run in ("run_torch", wrong))
        assert main(["config-check", "compare", *packs]) == 2
        first = capsys.readouterr().out.splitlines()[0]
        assert says in first, first
    assert json.loads(of_torch_python("-c", LOSSES)) == pytest.approx(losses("run_mindspore"), rel=1e-5)


def twice_the_rate(kind: Any, parameters: Any, rate: float, momentum: float) -> Any:
    return kind(parameters, 2 * rate, momentum=momentum)


def backwards(step: int) -> Any:
    """Return the batch in another order of tokens: shapes, statistics and types stay."""
    return tokens(step)[:, ::-1].copy()


LOSSES = "from tests.mindspore.glm_numbers import losses; print(losses('run_torch'))"


def trains(words: list[str]) -> None:
    """Run one of the two training scripts of the guide."""
    script, *arguments = words
    if script == "train_mindspore.py":
        glm_mindspore.main(*arguments)
        return
    of_torch_python("-c", f"from tests.mindspore.glm_torch import main; main(*{arguments!r})")


def of_torch_python(*words: str) -> str:
    """Run the Python that has PyTorch where the test stands, and return what it printed."""
    done = subprocess.run([str(TORCH), *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


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
