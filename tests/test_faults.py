"""Bad input and faults: the training goes on with the right numbers, and what is on disk can be read."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import trainprobe
from tests import zoo
from tests.lockstep import differences, one_step, seed_all, state
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.unmatched import Unmatched, names_not_there
from trainprobe.engine.plan.selection import Names
from trainprobe.errors import OutputError, PlanError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def forgiving(monkeypatch):
    """Faults of the tool disable it, as they do for users; under test they are raised otherwise."""
    monkeypatch.delenv("TRAINPROBE_ON_ERROR", raising=False)


def start(name="residual_gpt"):
    case = zoo.load(name)
    seed_all()
    model = case.build()
    return case, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def bare_state(name="residual_gpt", steps=3):
    case, model, optimizer = start(name)
    for step in range(steps):
        one_step(case, model, optimizer, step)
    return state(model, optimizer)


def assert_everything_is_readable(folder: Path) -> list[Path]:
    """Read every file below `folder` strictly; return the dumps that were found."""

    def refuse(token):
        raise AssertionError(f"bare {token} in JSON")

    for path in folder.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(key) is not None for key in file.keys())  # noqa: SIM118
    return sorted(folder.glob("step*/rank*/dump.json"))


# ---- plans that cannot be carried out ---------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path):
    _, model, optimizer = start()
    with (
        pytest.raises(PlanError, match=r"summery.*did you mean 'summary'"),
        trainprobe.watch(model, optimizer, output=tmp_path / "out", summery="md5"),
    ):
        pass


def test_a_value_of_the_wrong_type_is_refused(tmp_path):
    _, model, optimizer = start()
    with (
        pytest.raises(PlanError, match="stacks"),
        trainprobe.watch(model, optimizer, output=tmp_path / "out", stacks="perhaps"),
    ):
        pass


def test_a_module_pattern_that_matches_nothing_is_refused_with_the_nearest_name(tmp_path):
    _, model, optimizer = start()
    with (
        pytest.raises(PlanError, match=r"layers\.0\.atn.*did you mean 'layers\.0\.attn'"),
        trainprobe.watch(model, optimizer, output=tmp_path / "out", modules=["layers.0.atn"]),
    ):
        pass


def test_a_pattern_of_the_monitor_that_matches_nothing_is_told_with_the_nearest_name(tmp_path):
    case, model, optimizer = start()
    monitor = {"activations": {"names": ["layers.0.atn"]}, "gradients": {"names": ["layers.0.**", "!layers.9.**"]}}
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", level="off", monitor=monitor) as probe:
        with probe.step():
            one_step(case, model, optimizer, 0)
        told = [f.message for f in probe.findings if f.rule == "plan"]
    assert told[0].startswith("the plan's monitor.activations.names match nothing in ")
    assert told[0].endswith("'layers.0.atn' — did you mean 'layers.0.attn'?")
    assert "monitor.gradients.names" in told[1] and "'!layers.9.**'" in told[1]
    assert len(told) == 2


def test_a_pattern_may_name_what_another_stage_of_a_pipeline_holds():
    unmatched = [Unmatched("modules", Names(("layers.7.**", "layers.0.**")).unmatched(["layers.0.attn"]), must=True)]

    def told(**axes):
        return [(f.severity, f.message) for f in names_not_there(unmatched, "GPT", Place(1, 8, axes))]

    with pytest.raises(PlanError, match=r"the plan's modules match nothing in GPT: 'layers\.7\.\*\*'"):
        told(dp=(1, 8))
    ((severity, message),) = told(pp=(1, 4), dp=(0, 2))
    assert severity == "warning" and "GPT, stage 1 of a pipeline of 4: 'layers.7.**'" in message
    assert [severity for severity, _ in told(pp=(1, 4), vpp=(1, 2), tp=(1, 2))] == ["info"]


def test_a_step_that_never_comes_is_told_at_the_end(tmp_path):
    case, model, optimizer = start()
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", step=[1, 50]) as probe:
        for step in range(3):
            with probe.step():
                one_step(case, model, optimizer, step)
    assert ["50" in finding.message for finding in probe.findings if "never reached" in finding.message] == [True]


def test_an_op_pattern_that_matches_nothing_is_told_at_the_end(tmp_path):
    case, model, optimizer = start()
    with (
        trainprobe.watch(model, optimizer, output=tmp_path / "out", level="L1", ops=["Functional.linaer"]) as probe,
        probe.step(),
    ):
        one_step(case, model, optimizer, 0)
    assert any("Functional.linaer" in finding.message for finding in probe.findings)


# ---- output -------------------------------------------------------------------------------------------------------


def test_a_second_run_into_the_same_folder_is_refused_where_the_plan_says_so(tmp_path):
    for expected in (False, True):
        case, model, optimizer = start()
        try:
            plan = {"record": "L0", "on_existing": "refuse"}
            with trainprobe.watch(model, optimizer, plan, output=tmp_path / "out") as probe, probe.step():
                one_step(case, model, optimizer, 0)
        except OutputError as error:
            assert expected
            assert "on_existing" in str(error)
        else:
            assert not expected


@pytest.mark.parametrize("choice", ["continue", "replace"])
def test_a_second_run_into_the_same_folder_goes_ahead_when_told_to(choice, tmp_path):
    for first_step in (0, 5):
        case, model, optimizer = start()
        with (
            trainprobe.watch(model, optimizer, output=tmp_path / "out", record="L0", on_existing=choice) as probe,
            probe.step(first_step),
        ):
            one_step(case, model, optimizer, 0)
    kept = {path.name for path in (tmp_path / "out").glob("step*")}
    assert kept == ({"step0", "step5"} if choice == "continue" else {"step5"})


def test_a_folder_that_cannot_be_made_is_refused_before_the_training_starts(tmp_path):
    (tmp_path / "file").write_text("")
    _, model, optimizer = start()
    with pytest.raises(OutputError, match="file"), trainprobe.watch(model, optimizer, output=tmp_path / "file" / "out"):
        pass


FULL_DISK = """
import resource, sys, torch
from tests.lockstep import one_step
from tests.test_faults import start
import trainprobe
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a file that grows beyond this fails, as on a full disk
case, model, optimizer = start()
with trainprobe.watch(model, optimizer, output=sys.argv[1], level="mix", task="tensor") as probe:
    for step in range(3):
        with probe.step():
            loss = one_step(case, model, optimizer, step)[0]
print(float(loss), [finding.message for finding in probe.findings])
"""


def run_python(code: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRAINPROBE_ON_ERROR": "continue"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def test_a_full_disk_does_not_end_the_training_and_the_finding_says_what_was_lost(tmp_path):
    done = run_python(FULL_DISK, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "step" in done.stdout
    assert "lost" in done.stdout
    assert_everything_is_readable(tmp_path / "out")


# ---- faults of the tool and of the training ---------------------------------------------------------------------


class Stubborn(torch.Tensor):
    """A tensor that lets itself be computed with and not be looked at."""

    @property
    def dtype(self):
        raise RuntimeError("nobody looks at me")


class WithStubborn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.passes = nn.Identity()

    def forward(self, x):
        self.passes(torch.zeros(2).as_subclass(Stubborn))
        return self.second(self.first(x))


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_tensor_that_lets_nobody_look_costs_a_note_and_the_tool_goes_on(level, tmp_path, forgiving, capsys):
    def train(watched):
        seed_all()
        model = WithStubborn()
        optimizer = torch.optim.AdamW(model.parameters())
        case = zoo.Case("stubborn", WithStubborn, lambda step: (zoo.normal(step, 3, 4),), zoo.mean_of_leaves)
        if not watched:
            for step in range(2):
                one_step(case, model, optimizer, step)
            return state(model, optimizer)
        with trainprobe.watch(model, optimizer, output=tmp_path / "out", level=level) as probe:
            for step in range(2):
                with probe.step():
                    one_step(case, model, optimizer, step)
        assert probe.guard.tripped is None
        return state(model, optimizer)

    assert differences(train(False), train(True)) == []
    if level != "L1":
        notes = (tmp_path / "out/step1/rank0/dump.json").read_text()
        assert "nobody looks at me" in notes and "second" in notes


def test_what_was_collected_before_an_error_of_the_training_is_on_disk(tmp_path):
    case, model, optimizer = start()
    with pytest.raises(ZeroDivisionError), trainprobe.watch(model, optimizer, output=tmp_path / "out", level="mix") as probe:
        with probe.step():
            one_step(case, model, optimizer, 0)
        with probe.step():
            model(case.batch(1)[0])
            raise ZeroDivisionError
    dumps = assert_everything_is_readable(tmp_path / "out")
    assert [path.parent.parent.name for path in dumps] == ["step0", "step1"]
    assert any(key.startswith("Module.head") for key in json.loads(dumps[1].read_text())["data"])


def test_torch_is_as_it_was_after_an_error_of_the_training(tmp_path):
    from tests.traces import left_behind, traces

    case, model, optimizer = start()
    one_step(case, model, optimizer, 0)
    before = traces(model, optimizer)
    watching = trainprobe.watch(model, optimizer, output=tmp_path / "out", level="mix")
    with pytest.raises(ZeroDivisionError), watching as probe, probe.step():
        model(case.batch(1)[0]).sum().backward()
        raise ZeroDivisionError
    assert left_behind(before, traces(model, optimizer)) == {}


class Reenters(torch.autograd.Function):
    """A backward that runs a forward and a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(x * x, gradient)
        return x.grad


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(Reenters.apply(self.first(x)))


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_backward_inside_a_backward_gives_the_same_bits(level, tmp_path):
    from tests.lockstep import train

    case = zoo.Case("reentrant", Reentrant, lambda step: (zoo.normal(step, 3, 4),), zoo.mean_of_leaves)
    watched = train(case, watch=lambda m, o: trainprobe.watch(m, o, output=tmp_path / "out", level=level))
    assert differences(train(case), watched) == []


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_training_in_another_thread_is_neither_disturbed_nor_recorded(level, tmp_path):
    expected = bare_state("batchnorm_branches")
    case, model, optimizer = start("batchnorm_branches")
    found = {}

    def other():
        torch.set_num_threads(1)
        twin, sgd = twins
        for step in range(3):
            one_step(case, twin, sgd, step)
        found.update(state(twin, sgd))

    twins = (case.build(), None)
    twins[0].load_state_dict(model.state_dict())
    twins = (twins[0], torch.optim.AdamW(twins[0].parameters(), lr=0.01))
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", level=level) as probe, probe.step(0):
        thread = threading.Thread(target=other)
        thread.start()
        one_step(case, model, optimizer, 0)
        thread.join()
    data = json.loads((tmp_path / "out/step0/rank0/dump.json").read_text())["data"]
    assert [k for k in differences(expected, found) if "random state" not in k] == []
    assert not [key for key in data if key.endswith("forward.1") and key.startswith("Module.")]


# ---- signals -------------------------------------------------------------------------------------------------------


def start_endless(folder: Path, **plan) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/endless_training.py"), str(folder), json.dumps(plan)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise AssertionError(process.communicate()[1])
    return process


def stop(process: subprocess.Popen[str], signal_number: int, after: float) -> None:
    time.sleep(after)
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal_number)
    process.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
def test_everything_on_disk_is_readable_after_kill_9(moment, tmp_path):
    plan = [{"level": "mix"}, {"level": "L1", "task": "tensor"}][moment % 2]
    process = start_endless(tmp_path / "out", **plan)
    stop(process, signal.SIGKILL, after=random.Random(moment).uniform(0.2, 1.5))
    assert assert_everything_is_readable(tmp_path / "out")


@pytest.mark.slow
def test_everything_collected_is_on_disk_after_sigterm(tmp_path):
    process = start_endless(tmp_path / "out", level="mix")
    stop(process, signal.SIGTERM, after=1.0)
    assert process.returncode == -signal.SIGTERM
    dumps = assert_everything_is_readable(tmp_path / "out")
    numbers = sorted(int(path.parent.parent.name.removeprefix("step")) for path in dumps)
    assert numbers == list(range(len(numbers)))
