"""Failures that were saved: the script holds no code of a dump, and three lines run the call again."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import nn

import trainprobe
from trainprobe.errors import FormatError, UsageError
from trainprobe.op_check.cases import Case, NotChecked
from trainprobe.op_check.dump import check_dump, rank_folders
from trainprobe.op_check.expression import expression
from trainprobe.op_check.replay import write_replay
from trainprobe.op_check.saved_calls import CALL, read_saved

HOSTILE = "__import__('pathlib').Path('taken').touch()"


@pytest.mark.parametrize(
    "name",
    [
        *(f"Functional.gelu(t(0)) or {HOSTILE} or print", f"Tensor.add\n{HOSTILE}\n", "Torch.gelu#", "Functional.lambda"),
        *("Torch.load", "Torch.save", "Torch.os.system", "Functional.torch.load", "Torch.serialization.load"),
        *("load_library.__call__", "import_module.os", "_os.system", "mylib.__class__", "Tensor.__class__.x", "NPU.a-b"),
        *("Ｔorch.mm", "Functional.ｇelu", "name.__init__", "__file__.strip", ""),
    ],
)
def test_a_name_that_is_no_operator_is_not_written(name: str) -> None:
    with pytest.raises(NotChecked, match="is no operator"):
        expression(Case(name, (torch.ones(2),)))


@pytest.mark.parametrize("key", [f"x={HOSTILE}, y", "a b", "lambda", "x)", "ｘ", "\n", ""])
def test_a_keyword_that_is_no_name_is_not_written(key: str) -> None:
    with pytest.raises(NotChecked, match="is no Python name"):
        expression(Case("Functional.gelu", (torch.ones(2),), {key: 1}))


@pytest.mark.parametrize("leaf", [type("Evil", (str,), {"__repr__": lambda _: HOSTILE})("x"), object(), {1, 2}, print])
def test_an_argument_that_has_no_text_of_its_own_is_not_written(leaf: Any) -> None:
    with pytest.raises(NotChecked, match="cannot be written"):
        expression(Case("Functional.gelu", (torch.ones(2), [leaf])))


def test_arguments_are_constants_and_tensors() -> None:
    args = (torch.ones(2), [1, -2.5, float("inf"), -float("inf"), float("nan"), True, None], HOSTILE, {HOSTILE: 1})
    kwargs = {"dtype": torch.float32, "at": slice(0, None), "z": complex(float("inf"), 1), "quote": "'\"\\\n{x}", "o": ...}
    text = expression(Case("mylib.op", args, kwargs))
    (call,) = [node.body for node in [ast.parse(text, mode="eval")]]
    assert isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.ops.mylib.op"
    called = {ast.unparse(node.func) for node in ast.walk(call) if isinstance(node, ast.Call)}
    assert called == {"torch.ops.mylib.op", "t", "float", "slice", "complex"}
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    assert names == {"torch", "t", "float", "slice", "complex", "Ellipsis"}
    values = eval(text.replace("torch.ops.mylib.op", "keep"), {"keep": lambda *a, **k: (a, k), "t": str, "torch": torch})
    assert values[0][1][:4] == [1, -2.5, float("inf"), -float("inf")]
    assert values[0][2:] == (HOSTILE, {HOSTILE: 1})
    assert values[1]["quote"] == kwargs["quote"]


@pytest.fixture(scope="module")
def gelu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of one GELU with its backward."""
    folder = tmp_path_factory.mktemp("gelu")
    x = torch.linspace(-3, 3, 64, requires_grad=True)
    with trainprobe.watch(nn.Identity(), level="L1", task="tensor", step=[0], output=str(folder), console=False) as p, p.step():
        F.gelu(x, approximate="tanh").sum().backward()
    return folder


def test_a_hostile_dump_writes_a_script_without_its_code(gelu: Path, tmp_path: Path) -> None:
    at = tmp_path / "step0" / "rank0"
    at.mkdir(parents=True)
    for path in (gelu / "step0" / "rank0").iterdir():
        (at / path.name).write_bytes(path.read_bytes())
    (row,) = check_dump(rank_folders(tmp_path), ["Functional.gelu.0.forward"]).rows
    row.entry = f'Module."""\n{HOSTILE}\n"""{{x}}.../../../{"a" * 300}.0.forward'
    script = write_replay(row, tmp_path / "out")
    assert script.parent == tmp_path / "out"
    assert HOSTILE not in script.read_text(encoding="utf-8")
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "taken").exists()

    held = json.loads((at / "dump.json").read_text(encoding="utf-8"))
    call = held["data"]["Functional.gelu.0.forward"]
    call["input_kwargs"] = {f"approximate='tanh', y={HOSTILE}, z": {"type": "int", "value": 1}}
    (at / "dump.json").write_text(json.dumps(held), encoding="utf-8")
    (row,) = check_dump(rank_folders(tmp_path), ["Functional.gelu.0.forward"]).rows
    with pytest.raises(UsageError, match="is no Python name"):
        write_replay(row, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_three_lines_run_a_saved_failure_again(gelu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = check_dump(rank_folders(gelu), ["gelu"]).rows
    forward, backward = (write_replay(row, tmp_path).with_suffix(".safetensors") for row in rows)
    right, args, kwargs, out = trainprobe.compare_for_single_op(forward)
    assert right and kwargs == {"approximate": "tanh"}
    assert torch.equal(out, F.gelu(args[0], approximate="tanh"))
    assert capsys.readouterr().out.startswith("Functional.gelu on cpu succeeds: ")
    assert trainprobe.compare_for_single_op(forward, "torch.nn.functional.gelu")[0]
    wrong = lambda x, approximate: F.gelu(x) if approximate == "tanh" else x  # noqa: E731
    assert not trainprobe.compare_for_single_op(forward, wrong)[0]
    assert capsys.readouterr().out.splitlines()[-1].startswith("[ERROR] Functional.gelu on cpu fails: bug ")
    assert trainprobe.compare_for_single_op(forward, wrong, atol=1e-2, rtol=0.0)[0], "the two formulas are 5e-4 apart"
    right, _, _, gradients = trainprobe.compare_for_single_op(backward)
    assert right and gradients[0].shape == (64,)
    assert not trainprobe.compare_for_single_op(backward, lambda x, approximate: F.gelu(x))[0]

    assert trainprobe.nan_inf_track_for_single_op(forward)[0]
    assert not trainprobe.nan_inf_track_for_single_op(forward, lambda x, approximate: x.log())[0]
    assert "[WARNING] Functional.gelu on cpu: 32 of 64 elements are NaN or infinite" in capsys.readouterr().out


def test_what_is_no_saved_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a pickle, which can run code"):
        trainprobe.compare_for_single_op(tmp_path / "aten.addmm_inputs.pkl", "torch.ops.aten.addmm")
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    with pytest.raises(FormatError, match="cannot be read"):
        read_saved(tmp_path / "a.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match="holds no call"):
        read_saved(tmp_path / "a.safetensors")
    good = {"name": "Torch.mm", "args": {"tuple": []}, "kwargs": {"dict": {}}, "backward": False, "requires_grad": []}
    for odd in ("[]", "{", '{"args": {"what": 1}}', json.dumps(good | {"args": {"tuple": [{"torch": "load"}]}})):
        save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors", {CALL: odd})
        with pytest.raises(FormatError, match="cannot be read"):
            read_saved(tmp_path / "a.safetensors")
