"""The classic front: PrecisionDebugger with start, stop, step and save, and the config.json that people have."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest
import torch

import trainprobe
from trainprobe import PrecisionDebugger
from trainprobe.errors import UsageError
from trainprobe.pytorch import module_dump, module_dump_end, random_save


@pytest.fixture
def config(tmp_path):
    """Write a config.json in the dialect of mindstudio-probe; end the process's debugger afterwards."""
    path = tmp_path / "config.json"
    statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    settings = {"task": "statistics", "dump_path": str(tmp_path / "out"), "rank": [], "step": [0, 2], "level": "mix"}
    path.write_text(json.dumps({**settings, "statistics": statistics}))
    yield path
    PrecisionDebugger.close()


def train(debugger, steps=3, save=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        debugger.start(model=model)
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        if save:
            debugger.save(loss, "loss")
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()


def entries(tmp_path, step):
    return json.loads((tmp_path / f"out/step{step}/rank0/dump.json").read_text())["data"]


def test_the_selected_steps_are_dumped_and_no_other(config, tmp_path):
    train(PrecisionDebugger(config))
    PrecisionDebugger.close()
    assert sorted(path.name for path in (tmp_path / "out").glob("step*")) == ["step0", "step2"]


def test_forward_and_backward_between_start_and_stop_are_recorded(config, tmp_path):
    train(PrecisionDebugger(config))
    PrecisionDebugger.close()
    names = set(entries(tmp_path, 0))
    assert {"Module.0.Linear.forward.0", "Module.0.Linear.backward.0", "Functional.linear.1.backward"} <= names


def test_nothing_is_recorded_after_stop(config, tmp_path):
    train(PrecisionDebugger(config))
    PrecisionDebugger.close()
    assert not [name for name in entries(tmp_path, 0) if "add_" in name]  # the optimizer ran after stop


def test_saved_values_stand_beside_the_rest(config, tmp_path):
    train(PrecisionDebugger(config), save=True)
    PrecisionDebugger.close()
    assert entries(tmp_path, 2)["loss.0.debug"]["Norm"] >= 0


def test_every_verb_works_on_the_class(config, tmp_path):
    PrecisionDebugger(config)
    train(PrecisionDebugger)
    PrecisionDebugger.close()
    assert entries(tmp_path, 2)


def test_a_second_construction_with_the_same_settings_is_the_same_debugger(config):
    assert PrecisionDebugger(config) is PrecisionDebugger(config)


def test_a_second_construction_with_other_settings_is_an_error_that_names_them(config):
    PrecisionDebugger(config)
    with pytest.raises(UsageError, match="level: 'mix' and 'L0'"):
        PrecisionDebugger(config, level="L0")


def test_start_without_a_model_says_what_is_missing(config):
    PrecisionDebugger(config)
    with pytest.raises(UsageError, match="start\\(model=your_model\\)"):
        PrecisionDebugger.start()


def test_a_verb_before_the_first_construction_is_an_error():
    with pytest.raises(UsageError, match="make one first"):
        PrecisionDebugger.step()


def test_debug_level_records_only_what_is_saved(tmp_path):
    debugger = PrecisionDebugger(level="debug", dump_path=tmp_path / "out", step=[0])
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    debugger.save({"y": [y, 1.5]}, "values")
    y.sum().backward()
    debugger.step()
    PrecisionDebugger.close()
    data = json.loads((tmp_path / "out/step0/rank0/debug.json").read_text())["data"]
    assert list(data) == ["values.0.debug", "values_grad.0.debug"]
    assert data["values_grad.0.debug"]["y"][0]["Mean"] == 1.0


def classic(tmp_path, **keys):
    """Write a config.json that has these keys as well."""
    path = tmp_path / "config.json"
    settings = {"task": "statistics", "dump_path": str(tmp_path / "out"), "level": "L1", "risk_level": "ALL"}
    path.write_text(json.dumps({**settings, **keys}))
    return path


def test_recording_is_switched_on_and_off_while_the_training_runs(tmp_path, config):
    path = classic(tmp_path, dump_enable=False)
    debugger = PrecisionDebugger(path)
    for steps, enabled in ((2, True), (2, False), (1, True), (1, None)):
        train(debugger, steps=steps)
        if enabled is None:
            break
        classic(tmp_path, dump_enable=enabled, x=str(steps) * 9)
    PrecisionDebugger.close()
    assert sorted(path.name for path in (tmp_path / "out").glob("step*")) == ["step2", "step3", "step5"]


def test_a_switch_that_cannot_be_read_stays_as_it_is(tmp_path, config, capsys):
    debugger = PrecisionDebugger(classic(tmp_path, dump_enable=True))
    train(debugger, steps=1)
    (tmp_path / "config.json").write_text('{"dump_enable": fal')
    train(debugger, steps=1)
    PrecisionDebugger.close()
    assert sorted(path.name for path in (tmp_path / "out").glob("step*")) == ["step0", "step1"]
    assert capsys.readouterr().err.count("dump_enable stays true: ") == 1


@pytest.mark.parametrize("release", ["1.3", "26.2"])
def test_arguments_without_names_are_those_of_each_release(tmp_path, config, release):
    model = torch.nn.Linear(4, 1)
    further = (model, [0, "2-3"]) if release == "1.3" else ([0, "2-3"],)
    debugger = PrecisionDebugger(None, "statistics", str(tmp_path / "out"), "L0", *further)
    assert (debugger.plan.task, debugger.plan.level, debugger.plan.step) == ("statistics", "L0", (0, "2-3"))
    assert PrecisionDebugger() is debugger
    debugger.start() if release == "1.3" else debugger.start(model)
    model(torch.ones(2, 4)).sum().backward()
    debugger.forward_backward_dump_end()
    debugger.step()
    PrecisionDebugger.close()
    assert "Module.root.Linear.forward.0" in entries(tmp_path, 0)


def test_what_differs_is_printed_once_when_the_configuration_is_read(tmp_path, config, capsys):
    debugger = PrecisionDebugger(classic(tmp_path, seed=1, zzz=3))
    debugger.start(scheduled_tokens=[1, 3])
    debugger.stop()
    debugger.start(scheduled_tokens=[1, 3])
    told = capsys.readouterr().err
    assert [
        told.count(text)
        for text in ("zzz: unknown key", "call `from trainprobe.pytorch import seed_all", "start(scheduled_tokens=)")
    ] == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("native", [True, False])
def test_a_function_of_the_program_is_recorded_as_one_op(tmp_path, config, native):
    library = types.ModuleType("mylib")

    def gate(x, scale=1.0):
        a, b = x.chunk(2, -1)
        return torch.nn.functional.silu(a) * b * scale

    library.gate = gate
    debugger = PrecisionDebugger(classic(tmp_path), native=native)
    debugger.register_custom_api(library, "gate", "MyLib")
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    debugger.start()
    with Watching():
        out = library.gate(x, scale=2.0)
    out.sum().backward()
    debugger.stop()
    debugger.step()
    assert seen == ["chunk", "silu", "mul", "mul"]  # the program's own mode sees what it saw without us
    debugger.restore_custom_api(library, "gate")
    assert library.gate is gate
    with pytest.raises(UsageError, match="mylib has no function 'gat'"):
        debugger.register_custom_api(library, "gat")
    PrecisionDebugger.close()
    data = entries(tmp_path, 0)
    assert list(data) == ["MyLib.gate.0.forward", "Tensor.sum.0.forward", "Tensor.sum.0.backward", "MyLib.gate.0.backward"]
    assert data["MyLib.gate.0.forward"]["input_kwargs"]["scale"]["value"] == 2.0
    norm = data["MyLib.gate.0.forward"]["output"][0]["Norm"]
    assert norm == pytest.approx(float(gate(x, 2.0).detach().double().norm()), rel=1e-6)


def test_between_module_dump_and_its_end_the_module_alone_is_recorded(tmp_path, config):
    debugger = PrecisionDebugger(classic(tmp_path))
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for _ in range(2):
        debugger.start()
        x = torch.nn.functional.gelu(torch.ones(3, 4, requires_grad=True))
        module_dump(module, "mine")
        y = module(x) * 2
        z = module(y)
        module_dump_end()
        z.sum().backward()
        debugger.stop()
        debugger.step()
    PrecisionDebugger.close()
    kept = [name for name in entries(tmp_path, 1) if "ones" not in name]
    mine = [f"Module.mine.Sequential.{side}" for side in ("forward.0", "forward.1", "backward.1", "backward.0")]
    gelu = [f"Functional.gelu.0.{side}" for side in ("forward", "backward")]
    assert kept == [gelu[0], *mine[:2], "Tensor.sum.0.forward", "Tensor.sum.0.backward", *mine[2:], gelu[1]]
    assert torch.nn.Module._call_impl.__module__ == "torch.nn.modules.module"


def test_module_dump_says_where_it_changes_nothing(tmp_path, config, capsys):
    PrecisionDebugger(classic(tmp_path, level="L0"))
    module_dump(torch.nn.ReLU(), "mine")
    module_dump_end()
    assert "at level L0 modules are recorded as everywhere" in capsys.readouterr().err
    with pytest.raises(UsageError, match="give it a torch\\.nn\\.Module and a name"):
        module_dump("mine", torch.nn.ReLU())


@pytest.mark.parametrize(("tokens", "recorded"), [([1, 2], 2), ([0, 0], 1), ([3, 9], 1), (None, 4)])
def test_forwards_of_a_range_of_tokens_are_recorded(tmp_path, config, tokens, recorded):
    debugger = PrecisionDebugger(classic(tmp_path, level="L0"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for _ in range(2):
        debugger.start(model, tokens)
        for n in range(4):
            model(torch.full((1, 4), float(n)))
        debugger.stop()
        debugger.step()
    PrecisionDebugger.close()
    for step in range(2):
        assert list(entries(tmp_path, step)) == [
            f"Module.{name}.forward.{n}" for n in range(recorded) for name in ("root.Sequential", "0.Linear")
        ]
    first = entries(tmp_path, 1)["Module.0.Linear.forward.0"]["input_args"][0]["Max"]
    assert first == (tokens[0] if tokens else 0)
    assert "_call_impl" not in vars(model)


@pytest.mark.parametrize("tokens", [[2, 1], [-1, 3], 4, [1], ["0", "1"]])
def test_a_range_of_tokens_that_is_none_is_an_error(tmp_path, config, tokens):
    PrecisionDebugger(classic(tmp_path))
    with pytest.raises(UsageError, match="write \\[first, last\\]"):
        PrecisionDebugger.start(torch.nn.ReLU(), tokens)
    with pytest.raises(UsageError, match="counts the forward passes of a model"):
        PrecisionDebugger.start(None, [0, 1])


def test_the_first_step_and_the_rank_are_as_they_were_given(tmp_path, config):
    debugger = PrecisionDebugger(classic(tmp_path, level="L0"))
    debugger.set_init_step(5)
    model = torch.nn.Linear(4, 4)
    debugger.start(model, rank_id=3)
    model(torch.ones(1, 4))
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    assert [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("step*/rank*")] == ["step5/rank3"]


def test_seed_all_repeats_random_numbers_and_removes_dropout_on_request():
    code = """
import random, numpy, torch
from trainprobe.pytorch import seed_all
from trainprobe.errors import UsageError
def draw(): return random.random(), numpy.random.rand(), float(torch.rand(()))
seed_all(7); first = draw()
seed_all(7); assert draw() == first
seed_all(8); assert draw() != first
x = torch.ones(100)
assert float(torch.nn.Dropout(0.5)(x).min()) == 0.0
seed_all(7, mode=True, rm_dropout=True)
assert float(torch.nn.Dropout(0.5)(x).min()) == float(torch.nn.functional.dropout(x, p=0.9).min()) == 1.0
assert torch.are_deterministic_algorithms_enabled()
try: seed_all(-1)
except UsageError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "seed_all: -1 is no seed" in done.stdout, done.stderr


def test_what_cannot_be_had_says_what_replaces_it(capsys):
    with pytest.raises(ImportError, match="graphs that a device replays are not recorded"):
        from trainprobe.pytorch import acl_save  # noqa: F401  # pyright: ignore
    random_save("out")
    assert "trainprobe.ConfigChecker captures each random call" in capsys.readouterr().err
    from trainprobe.core import SingleSave

    assert SingleSave is trainprobe.SingleSave


ENDINGS = """
import os, sys, torch
from trainprobe.pytorch import PrecisionDebugger

def stops(): PrecisionDebugger.stop()
def exits(): sys.exit(3)
def raises(): raise ValueError("of the program")
def interrupted(): raise KeyboardInterrupt

for end in (stops, exits, raises, interrupted):
    if not (child := os.fork()):
        PrecisionDebugger(dump_path=f"{sys.argv[1]}/{end.__name__}", level="mix")
        model = torch.nn.Linear(4, 2)
        PrecisionDebugger.start(model=model)
        model(torch.ones(3, 4)).sum().backward()
        end()
        break
    os.waitpid(child, 0)
"""


def test_a_program_that_ends_within_a_step_leaves_its_calls_and_no_traceback_of_the_tool(tmp_path):
    command = [sys.executable, "-c", ENDINGS, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for end in ("stops", "exits", "raises", "interrupted"):
        data = json.loads((tmp_path / end / "step0/rank0/dump.json").read_text())["data"]
        assert "Module.root.Linear.backward.0" in data, end
    assert "disabled" not in said and "trainprobe/" not in said, said
    assert said.count("Traceback") == 2, said  # the program's own
    assert said.count("trainprobe: 1 step watched") == 1, said  # the one that stopped
