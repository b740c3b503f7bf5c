"""The classic front under MindSpore: a loop that is written out, a Model with its callback, and the same bits without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.mindspore.tiny import BATCH, GRAPH, PYNATIVE, Data, Loss, Net, train
from trainprobe.cli import main
from trainprobe.engine.plan.loading import load_plan
from trainprobe.errors import PlanError, UsageError
from trainprobe.integrations import mindspore_front, mindspore_save
from trainprobe.mindspore import MsgConst, MsprobeInitStep, MsprobeStep, PrecisionDebugger, save, save_grad, seed_all, step


@pytest.fixture
def config(tmp_path):
    """Write a config.json; end the process's debugger afterwards."""

    def write(**keys: Any) -> str:
        path = tmp_path / "config.json"
        settings = {"task": "statistics", "dump_path": str(tmp_path / "out"), "level": "L0", "step": [1]}
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


def test_seed_all_repeats_random_numbers_and_says_that_dropout_stays(monkeypatch, capsys):
    monkeypatch.setattr(mindspore_front, "_reported", set())
    draws = []
    for seed in (3, 3, 4):
        seed_all(seed)
        draws.append((float(np.random.rand()), ms.ops.rand(2).asnumpy().tobytes()))
    assert draws[0] == draws[1] != draws[2]
    assert capsys.readouterr().err.count("seed_all(): dropout stays as it is") == 1
    with pytest.raises(UsageError, match="is no seed"):
        seed_all(-1)


def test_dropout_is_taken_out_of_cells_functions_and_primitives(monkeypatch):
    for cell in mindspore_front._CELLS:
        monkeypatch.setattr(cell, "construct", cell.construct)
    for module, name in (
        *mindspore_front._FUNCTIONS,
        *((module, name) for module in (ms.ops, ms.ops.operations) for name in mindspore_front._PRIMITIVES),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    images, x = ms.Tensor(np.ones((2, 3, 4, 5), np.float32)), ms.Tensor(np.ones(100, np.float32))
    ms.set_context(mode=PYNATIVE)
    assert float(nn.Dropout(p=0.9).set_train()(x).asnumpy().min()) == 0.0
    seed_all(3, rm_dropout=True)
    for kept in (
        nn.Dropout(p=0.9).set_train()(x),
        ms.mint.nn.Dropout(0.9).set_train()(x),
        ms.ops.dropout(x, 0.9),
        ms.mint.nn.functional.dropout(x, 0.9, True),
        ms.ops.Dropout(keep_prob=0.1)(x)[0],
        ms.ops.Dropout2D(0.1)(images)[0],
        nn.Dropout2d(0.9).set_train()(images),
    ):
        assert set(kept.asnumpy().ravel().tolist()) == {1.0}
    assert ms.ops.Dropout(keep_prob=0.1).name == "Dropout"


def test_a_function_of_the_program_is_one_op_until_it_is_restored(config, tmp_path):
    debugger = PrecisionDebugger(config(level="L1", step=[0, 1]))
    own = ModuleType("own")
    own.scaled = lambda x, by: ms.ops.relu(x * by)  # type: ignore[attr-defined]
    original = own.scaled
    debugger.register_custom_api(own, "scaled", "Mine")
    x = ms.Tensor([-1.0, 2.0], ms.float32)
    for _ in range(2):
        debugger.start(Net())
        gradient = ms.grad(lambda x: own.scaled(x, by=3.0).sum())(x)
        debugger.stop()
        debugger.step()
        debugger.restore_custom_api(own, "scaled")
    PrecisionDebugger.close()
    assert own.scaled is original and gradient.asnumpy().tolist() == [0.0, 3.0]
    entry = entries(tmp_path, 0)["Mine.scaled.0.forward"]
    assert entry["input_args"][0]["Min"] == -1.0 and entry["input_kwargs"]["by"]["value"] == 3.0
    assert entry["output"][0]["Max"] == 6.0
    assert not any("Mul" in name or "ReLU" in name for name in entries(tmp_path, 0) if "forward" in name)
    assert any("ReLU" in name for name in entries(tmp_path, 1)) and "Mine.scaled.0.forward" not in entries(tmp_path, 1)
    with pytest.raises(UsageError, match="has no function 'none'"):
        PrecisionDebugger(config(level="L1")).register_custom_api(own, "none")


def test_a_range_of_tokens_chooses_forward_passes(config, tmp_path):
    ms.set_context(mode=PYNATIVE)
    net, x = Net(), ms.Tensor(Data().x[:BATCH])
    debugger = PrecisionDebugger(config(step=[0]))
    debugger.start(net, token_range=[1, 2])
    for _ in range(4):
        net(x)
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    assert [name for name in entries(tmp_path, 0) if name.startswith("Cell.head.")] == [
        f"Cell.head.Dense.forward.{i}" for i in (0, 1)
    ]
    assert "construct" not in vars(net)


class Saves(nn.Cell):
    """Saves with a function that is handed (name, data), and gradients with another that returns the tensor."""

    def __init__(self, keep: Any, keep_gradient: Any) -> None:
        super().__init__()
        self.layer = nn.Dense(3, 2)
        self.keep, self.keep_gradient = keep, keep_gradient

    def construct(self, x: Any) -> Any:
        h = self.layer(x)
        self.keep("values", {"h": h, "more": [x, None], "half": h.astype(ms.bfloat16)})
        h = self.keep_gradient("h", h)
        return ms.ops.ReduceMean()(h * h)


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_save_writes_what_tensor_dump_of_mindspore_writes(mode, tmp_path):
    """The oracle is the operator with which mindstudio-probe saves: on a CPU it runs in PyNative mode alone."""
    folders = {name: str(tmp_path / name) for name in ("ours", "theirs")}
    dump = ms.ops.TensorDump()

    def theirs(name: str, data: Any) -> None:
        for key, value in (("h", data["h"]), ("more.0", data["more"][0]), ("half", data["half"].float())):
            dump(f"{folders['theirs']}/{{step}}/{{rank}}/{name}.{key}", value)

    def their_gradient(name: str, data: Any) -> Any:
        def seen(gradient: Any) -> Any:
            dump(f"{folders['theirs']}/{{step}}/{{rank}}/{name}_grad", gradient)
            return gradient

        return ms.ops.InsertGradientOf(seen)(data)

    def ours(name: Any, data: Any) -> None:
        save(folders["ours"], name, data)

    def our_gradient(name: Any, data: Any) -> Any:
        return save_grad(folders["ours"], name, data)

    def bits(mode: int, keep: Any, keep_gradient: Any) -> list[bytes]:
        ms.set_context(mode=mode)
        seed_all(7)
        net = Saves(keep, keep_gradient)
        x = ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
        loss, gradients = ms.value_and_grad(net, None, net.trainable_params())(x)
        return [t.asnumpy().tobytes() for t in (loss, *gradients)]

    first = mindspore_save._Steps.done
    on = bits(mode, ours, our_gradient)
    assert on == bits(PYNATIVE, theirs, their_gradient)
    step()
    assert mindspore_save._Steps.done == first + 1
    ms.hal.synchronize()
    written = [found(tmp_path / "ours" / f"step{first}/rank0"), found(tmp_path / "theirs/step0/rank0")]
    assert sorted(written[0]) == sorted(written[1]) != []
    assert [written[0][name] for name in sorted(written[0])] == [written[1][name] for name in sorted(written[1])]


def found(folder: Path) -> dict[str, bytes]:
    """Return name without the number that is counted → dtype, shape and bits; waits for what is written meanwhile."""
    for _ in range(100):
        files = sorted(folder.glob("*.npy"))
        if len(files) == 4:
            break
        time.sleep(0.05)
    arrays = {path.stem.rpartition("_")[0]: np.load(path) for path in files}
    return {name: f"{a.dtype} {a.shape} ".encode() + a.tobytes() for name, a in arrays.items()}


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="the name of no file"):
        save(str(tmp_path), "../x", ms.Tensor([1.0]))
    with pytest.raises(TypeError, match="give it a tensor"):
        save(str(tmp_path), "x", 3)


def test_what_cannot_be_had_is_a_sentence(config, capsys):
    ms.set_context(mode=GRAPH)
    debugger = PrecisionDebugger(config())
    debugger.start(Net(), token_range=[0, 1])
    assert "start(token_range=): in graph mode" in capsys.readouterr().err
    with pytest.raises(ImportError, match="the same JSON can be its plan"):
        from trainprobe.mindspore import TrainerMon  # noqa: F401
    with pytest.raises(ImportError, match="dump-compare"):
        from trainprobe.mindspore import GradComparator  # noqa: F401
    with pytest.raises(UsageError, match=r"trainprobe.watch\(net, optimizer"):
        debugger.monitor(None)
    with pytest.raises(UsageError, match="`modules: "):
        debugger.module_dump(Net(), "head")


def test_an_error_before_there_is_a_debugger_has_the_text_of_msg_const():
    for verb in (PrecisionDebugger.start, PrecisionDebugger.stop, PrecisionDebugger.step):
        with pytest.raises(UsageError) as raised:
            verb()
        assert str(raised.value) == MsgConst.NOT_CREATED_INSTANCE


@pytest.mark.parametrize(
    "task",
    ["statistics", "tensor", "structure", "nan_check", "overflow_check", "exception_dump", "grad_probe", "free_benchmark"],
)
def test_each_task_of_a_classic_configuration_is_carried_out_or_refused_with_a_sentence(task, config, tmp_path):
    """Nothing but the documented keys: that tool's defaults (risk_level FOCUS, one file a tensor) must not refuse the run."""
    path = config(task=task)
    if task == "free_benchmark":
        with pytest.raises(PlanError, match="op_check: operators of PyTorch alone are judged"):
            PrecisionDebugger(path)
        return
    loop(PrecisionDebugger(path))
    PrecisionDebugger.close()
    if task == "grad_probe":
        assert any((tmp_path / "out").rglob("grad_reduced*.csv")) or any((tmp_path / "out").rglob("*.parquet"))
        return
    assert "Cell.head.Dense.forward.0" in entries(tmp_path, 1)
    assert any((tmp_path / "out").rglob("*.npy")) == (task == "tensor")


def test_a_chosen_risk_level_has_no_effect_and_a_note_says_so():
    plan = load_plan({"task": "statistics", "dump_path": "d", "risk_level": "CORE", "seed": 3}, "mindspore")
    assert plan.ops_scope == "all"
    assert any("risk_level: not used under MindSpore" in note for note in plan.notes)
    assert any("from trainprobe.mindspore import seed_all" in note for note in plan.notes)


PEER = next((Path(sys.prefix).parent / "msprobe").glob("lib/python3*/site-packages/msprobe"), None)
assert PEER is not None or os.environ.get("CI") != "true", "CI runs mindstudio-probe itself: make .venvs/msprobe/.ready"


NO_PEER = pytest.mark.skipif(PEER is None, reason="no environment `msprobe` lies beside this one (make .venvs/msprobe/.ready)")
RUNS = {"theirs": ("msprobe",), "again": ("msprobe",), "planted": ("msprobe", "planted"), "ours": ("trainprobe",)}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return run → its folder: of mindstudio-probe, which runs under MindSpore on a CPU but for one kernel, and of ours.

    The kernel is the norm of `mint`, which the script calculates.
    """
    folders = {}
    for name, (package, *more) in RUNS.items():
        folders[name] = folder = tmp_path_factory.mktemp(name)
        script = str(Path(__file__).with_name("run_classic_front.py"))
        command = [sys.executable, script, str(folder), "mix", package, str(PEER and PEER.parent), *more]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    return folders


@NO_PEER
def test_a_script_of_mindstudio_probe_leaves_the_same_numbers_of_cells_behind(dumped):
    left = {}
    for run in ("theirs", "ours"):
        dumps = sorted((dumped[run] / "out").glob("step*/*/dump.json"))
        left[run] = [json.loads(path.read_text())["data"] for path in dumps], (dumped[run] / "bits.txt").read_text()
    (theirs, their_bits), (ours, our_bits) = left["theirs"], left["ours"]
    assert our_bits == their_bits and len(theirs) == len(ours) == 2
    for there, here in zip(theirs, ours, strict=True):
        cells = {name for name in there if name.startswith("Cell.")}
        assert {name for name in here if name.startswith("Cell.")} - cells == {
            "Cell.root.Net.forward.0",  # the model itself, which that tool leaves out
            "Cell.root.Net.backward.0",
        }
        assert len(cells) == 8
        for name in cells:
            assert tensors(here[name]) == pytest.approx(tensors(there[name]), rel=1e-6), name
        primitives = {name.rpartition(".MatMul")[2] for name in there if "MatMul" in name}
        assert {name.rpartition(".MatMul")[2] for name in here if "MatMul" in name} == primitives


def compared(dumped: dict[str, Path], run: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[dict[str, Any]]]:
    """Compare their dump with that of another run; return exit code, first line and calls."""
    told = dumped[run] / "all.json"
    code = main(["dump-compare", str(dumped["theirs"] / "out"), str(dumped[run] / "out"), "--json", str(told)])
    return code, capsys.readouterr().out.splitlines()[0], json.loads(told.read_text())["calls"]


@NO_PEER
def test_a_dump_of_mindstudio_probe_agrees_with_its_repeat_and_a_planted_weight_is_named(dumped, capsys):
    code, line, calls = compared(dumped, "again", capsys)
    assert code == 0 and line == "all 52 calls agree in all that the dumps hold of them"
    assert len(calls) == 52
    code, line, calls = compared(dumped, "planted", capsys)
    assert code == 2
    assert line.startswith(
        "the first difference is at Primitive.matmul.MatMul.0.forward (step 1, rank 0): it is given something else, input.1"
    )
    assert {call["verdict"] for call in calls if call["step"] == 0} == {"identical"}


@NO_PEER
def test_a_dump_of_mindstudio_probe_agrees_with_ours_and_each_call_is_accounted_for(dumped, capsys):
    """That tool alone records `Shape`, which returns no tensor, and the gradients that operators are given."""
    code, line, calls = compared(dumped, "ours", capsys)
    assert code == 3 and line == "what both dumps hold agrees within rounding, but parts of one have no partner in the other"
    assert len(calls) == 52
    assert {call["verdict"] for call in calls} == {"identical", "rounding", "carried", "missing"}
    missing = {(call["a"], call["b"]) for call in calls if call["verdict"] == "missing"}
    assert missing == {
        *((f"Primitive.shape_op.Shape.{i}.forward", None) for i in (0, 1)),
        *((f"Primitive.bias_add.BiasAdd.{i}.backward", f"Primitive.BiasAdd.{i}.backward") for i in (0, 1)),
        ("Primitive.matmul.MatMul.1.backward", "Primitive.MatMul.1.backward"),
    }
    theirs = json.loads(next((dumped["theirs"] / "out/step0").glob("*/dump.json")).read_text())["data"]
    seen = {call["a"] for call in calls if call["step"] == 0}
    assert {name for name in theirs if name.startswith(("Cell.", "Primitive."))} <= seen


def tensors(tree: Any, at: str = "") -> dict[str, Any]:
    """Return path of each number of each tensor of an entry → the number."""
    if isinstance(tree, dict) and "Max" in tree:
        assert tree["type"] == "mindspore.Tensor" and tree["dtype"] == "Float32"
        return {f"{at}.{key}": tree[key] for key in ("Max", "Min", "Mean", "Norm")} | {
            f"{at}.{i}": n for i, n in enumerate(tree["shape"])
        }
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {path: number for key, value in inner for path, number in tensors(value, f"{at}.{key}").items()}
