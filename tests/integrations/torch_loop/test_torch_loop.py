"""A plain loop that is not edited: `torch_loop.attach`, and `trainprobe run` over plain loops, Lightning and the Trainer."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from tests.distributed.launch import ROOT, free_port
from tests.integrations.records import recorded, steps_of
from tests.lockstep import bits_of
from trainprobe.integrations.torch_loop import attach

SCRIPT = str(Path(__file__).with_name("loop_script.py"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRAINPROBE_ON_ERROR": "raise"}


def run(*command: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, cwd=cwd, env=ENVIRONMENT)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


def watched(plan: Path, *command: str, cwd: Path, code: int = 0) -> str:
    return run("-m", "trainprobe", "run", str(plan), "--", *command, cwd=cwd, code=code)


@pytest.fixture
def plan(tmp_path) -> Path:
    text = f"output: {tmp_path / 'out'}\nlevel: L0\nmonitor:\n  optimizer_state: true\n"
    (tmp_path / "plan.yaml").write_text(text)
    return tmp_path / "plan.yaml"


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> torch.Tensor:
    loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_loop_is_followed_by_its_updates_and_let_go_again(tmp_path):
    call, backward = torch.nn.Module._call_impl, torch.autograd.backward
    model, optimizer = small()
    loop = attach(model, optimizer, {"level": "L0"}, output=tmp_path / "out", first_step=7)
    losses = [one_step(model, optimizer, seed) for seed in range(3)]
    loop.close()
    found = recorded(tmp_path / "out")
    assert list(found) == [7, 8, 9]
    assert [numbers["loss"] for numbers in found.values()] == [float(loss) for loss in losses]
    assert (torch.nn.Module._call_impl, torch.autograd.backward) == (call, backward)
    assert pickle.loads(pickle.dumps(model))


def test_a_loop_that_is_resumed_after_its_first_step_goes_on(tmp_path):
    model, optimizer = small()
    for step in range(3):
        loop = attach(model, optimizer, {"level": "L0"}, output=tmp_path / "out", first_step=step)
        one_step(model, optimizer, step)
        loop.close()
    assert list(recorded(tmp_path / "out")) == [0, 1, 2]


def test_the_whole_model_is_among_what_is_recorded_of_its_first_call(tmp_path):
    model, optimizer = small()
    loop = attach(model, optimizer, {"level": "L0"}, output=tmp_path / "out")
    one_step(model, optimizer)
    loop.close()
    names = [call.name for call in next(steps_of(tmp_path / "out")).calls if call.phase == "forward"]
    assert names == ["root", "0", "1", "2"]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    moments = [entries[key] for entries in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [bits_of(t) for t in (*model.parameters(), *moments, torch.get_rng_state())]


@pytest.mark.proves("PyTorch", "torch.compile")
@pytest.mark.parametrize("how", ["the model", "a part of it", "in place"])
def test_a_compiled_model_trains_to_the_same_bits(tmp_path, how):
    found = []
    for watches in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(9)
        model, optimizer = small()
        called = model
        if how == "the model":
            called = torch.compile(model, backend="aot_eager")
        elif how == "a part of it":
            model[2] = torch.compile(model[2], backend="aot_eager")
        else:
            model.compile(backend="aot_eager")
        loop = attach(called, optimizer, {"level": "mix", "monitor": True}, output=tmp_path / "out") if watches else None
        losses = [bits_of(one_step(called, optimizer, seed)) for seed in range(3)]
        if loop is not None:
            loop.close()
        found.append([*losses, *state_of(model, optimizer)])
    assert found[0] == found[1]
    assert {name for name in recorded(tmp_path / "out")[2] if name.endswith(" grad")} == {
        f"{name} grad" for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    }


@pytest.mark.proves("PyTorch", "several watchers")
def test_two_watchers_work_beside_each_other_and_a_third_takes_over_when_they_are_gone(tmp_path):
    hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    places = [torch.nn.Module._call_impl, torch.autograd.backward, torch.amp.GradScaler.scale, *map(dict, hooks)]
    found = []
    for watches in (False, True):
        torch.manual_seed(9)
        model, optimizer = small()
        plans = {"one": {"level": "L0"}, "two": {"level": "mix", "step": 1, "monitor": True}} if watches else {}
        loops = [attach(model, optimizer, plan, output=tmp_path / name) for name, plan in plans.items()]
        losses = [bits_of(one_step(model, optimizer, seed)) for seed in range(3)]
        for loop in loops:
            loop.close()
        third = attach(model, optimizer, output=tmp_path / "third", first_step=3) if watches else None
        losses += [bits_of(one_step(model, optimizer, 3))]
        if third is not None:
            third.close()
        found.append([*losses, *state_of(model, optimizer)])
    assert found[0] == found[1]
    assert [list(recorded(tmp_path / name)) for name in ("one", "two", "third")] == [[0, 1, 2], [0, 1, 2], [3]]
    assert [torch.nn.Module._call_impl, torch.autograd.backward, torch.amp.GradScaler.scale, *map(dict, hooks)] == places


def test_a_hook_that_somebody_else_has_on_every_update_is_called_as_before(tmp_path):
    model, optimizer = small()
    seen = []
    loop = attach(model, optimizer, output=tmp_path / "out")
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    one_step(model, optimizer)
    one_step(model, optimizer)
    handle.remove()
    loop.close()
    assert len(seen) == 2
    assert list(recorded(tmp_path / "out")) == [0, 1]


def test_another_models_updates_and_forwards_belong_to_no_step(tmp_path):
    (model, optimizer), (other, others) = small(), small()
    loop = attach(model, optimizer, output=tmp_path / "out")
    for seed in range(2):
        one_step(other, others, seed)
        one_step(model, optimizer, seed)
    loop.close()
    assert list(recorded(tmp_path / "out")) == [0, 1]


@pytest.mark.proves("PyTorch", "accumulation and clipping")
def test_a_script_is_run_unedited_with_the_same_output_and_its_steps_and_micro_batches_seen(tmp_path, plan):
    assert watched(plan, SCRIPT, cwd=tmp_path) == run(SCRIPT, cwd=tmp_path)
    collected_steps = list(steps_of(tmp_path / "out"))
    assert [step_data.step for step_data in collected_steps] == [0, 1, 2, 3, 4]
    for step_data in collected_steps:
        assert [call.micro for call in step_data.calls if call.name == "0" and call.phase == "forward"] == [0, 1], (
            "evaluation is left out"
        )
        assert {"loss", "grad_norm", "lr"} <= set(step_data.scalars)


@pytest.mark.proves("PyTorch", "GradScaler")
def test_a_step_that_the_loss_scaler_skips_is_a_step_and_says_so(tmp_path, plan):
    assert watched(plan, SCRIPT, "scaler", cwd=tmp_path) == run(SCRIPT, "scaler", cwd=tmp_path)
    found = recorded(tmp_path / "out")
    assert list(found) == [0, 1, 2, 3, 4]
    assert [step for step, numbers in found.items() if numbers.get("step_skipped")] == [2]
    assert [found[step]["loss_scale"] for step in (0, 2, 3)] == [4.0, 4.0, 2.0]


@pytest.mark.proves("PyTorch", "a crash")
def test_a_script_that_fails_keeps_its_error_and_its_exit_code_and_what_was_seen(tmp_path, plan):
    watched(plan, SCRIPT, "crash", cwd=tmp_path, code=1)
    collected_steps = list(steps_of(tmp_path / "out"))
    assert [(step_data.step, step_data.complete) for step_data in collected_steps] == [
        (0, True),
        (1, True),
        (2, True),
        (3, False),
    ]


@pytest.mark.proves("PyTorch", "torchrun", ranks=2)
def test_every_rank_that_a_launcher_starts_is_watched(tmp_path, plan):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}", SCRIPT)
    assert sorted(watched(plan, *launcher, cwd=tmp_path).split()) == sorted(run(*launcher, cwd=tmp_path).split())
    one, two = (recorded(tmp_path / "out", rank) for rank in range(2))
    assert list(one) == list(two) == [0, 1, 2, 3, 4]
    assert one[4]["0.weight grad"] == two[4]["0.weight grad"] and one[4]["loss"] != two[4]["loss"]


@pytest.mark.proves("Accelerate", "accumulation and clipping")
def test_a_loop_of_accelerate_steps_where_its_accumulation_ends(tmp_path, require):
    accelerate = require("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # what an earlier Trainer of this process set
    accelerate.state.GradientState._reset_state()
    model, optimizer = small()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    loop = attach(model, optimizer, {"level": "L0", "monitor": {"optimizer_state": True}}, output=tmp_path / "out")
    norms, losses = [], []
    for micro in range(6):
        with accelerator.accumulate(model):
            loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(micro))).square().mean()
            losses.append(float(loss.detach()))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    loop.close()
    found = recorded(tmp_path / "out")
    assert [numbers["grad_norm"] for numbers in found.values()] == norms
    assert [numbers["loss"] for numbers in found.values()] == pytest.approx(
        [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    )
    assert found[2]["0.weight exp_avg_after"] > 0


LIGHTNING = """
import sys, torch
from tests.integrations.lightning.small_lightning import loader, module, trainer
trainer([]).fit(module(), loader())
"""
TRAINER = """
from tests.integrations.transformers.small_trainer import train
train("hf", [])
"""


@pytest.mark.parametrize(("library", "text", "steps"), [("lightning.pytorch", LIGHTNING, 8), ("transformers", TRAINER, 4)])
def test_a_script_of_a_framework_gets_its_callback_and_no_second_watcher(tmp_path, plan, require, library, text, steps):
    require(library)
    (tmp_path / "train.py").write_text(text)
    watched(plan, "train.py", cwd=tmp_path)
    assert list(recorded(tmp_path / "out")) == list(range(steps) if steps == 8 else range(1, 5))


def test_what_cannot_be_run_is_told_before_anything_starts(tmp_path, plan):
    run("-m", "trainprobe", "run", str(plan), cwd=tmp_path, code=3)
    run("-m", "trainprobe", "run", "no.yaml", "--", SCRIPT, cwd=tmp_path, code=3)


def test_two_processes_without_a_rank_train_and_each_has_a_folder(tmp_path, plan):
    """As trainers of a parameter server, which speak by RPC: the second finds the folder of the first."""
    (tmp_path / "train.py").write_text(
        "import sys, subprocess, torch\n"
        "if len(sys.argv) == 1:\n"
        "    first = subprocess.Popen([sys.executable, 'train.py', 'first'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "    first.stdout.readline()\n"
        "    subprocess.run([sys.executable, 'train.py', 'second'], check=True)\n"
        "    first.communicate(b'go on')\n"
        "    sys.exit(first.returncode)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    if step == 1 and sys.argv[1] == 'first':\n"
        "        print('trains', flush=True)\n"
        "        sys.stdin.read()\n"
        "print(sys.argv[1], 'is done', file=sys.stderr)\n"
    )
    command = [sys.executable, "-m", "trainprobe", "run", str(plan), "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=ENVIRONMENT, check=False)
    assert done.returncode == 0 and "first is done" in done.stderr and "second is done" in done.stderr, done.stderr
    assert done.stderr.count("another process of this run has no rank either: this one writes to") == 1, done.stderr
    (second,) = (tmp_path / "out").glob("process*")
    assert list(recorded(tmp_path / "out")) == list(recorded(second)) == list(range(4))
