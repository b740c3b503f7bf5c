"""A process that dies within a step: where it was is told, and all that the step had brought, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from trainprobe.cli import main
from trainprobe.engine.core.position import AFTER_FORWARD, BEGUN, BYTES, FORWARD, Position, Where, read_position
from trainprobe.engine.storage.dumps.record_log import decode
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box
from trainprobe.monitor.black_box.last_words import last_words
from trainprobe.monitor.black_box.ring import read_where

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("dies_in_a_step.py")
STEP = 5
UNSURE = (
    f"It was at step {STEP}, the loss or the backward pass of micro-batch 1."  # no stacks tell it, and no gradient was seen
)
PLACES = {
    "forward": f"It was at step {STEP}, the forward pass of micro-batch 1, in 1.fc.",
    "backward": f"It was at step {STEP}, the backward pass of micro-batch 1.",
    "inside": f"It was at step {STEP}, the backward pass of micro-batch 1; the last gradient seen was that of 1.fc.",
    "optimizer": f"It was at step {STEP}, the optimizer.",
}


def environment(**more):
    """Return the environment of a process that is to die."""
    told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    told.pop("PYTHONFAULTHANDLER", None)
    return told


def die(folder, how, where, **more):
    """Train in a process until it dies; return its exit status and the norm that it printed last."""
    command = [sys.executable, str(SCRIPT), str(folder), how, where]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    assert "disabled itself" not in done.stderr
    return done.returncode, float(done.stdout)


def steps_of(folder):
    """Return the box, and the steps in it as collected steps."""
    (path,) = find_boxes(folder)
    head, steps = read_box(path)
    return path, head, [decode(orjson.dumps(step["reel"])) for step in steps]


def norms_of(step_data, name):
    return [
        record.values["norm"]
        for record in step_data.records()
        if (record.site.kind, record.site.name, record.site.slot) == ("module", name, "output")
    ]


WHERE = ["forward", "backward", "inside", "optimizer"]
SUDDEN = {
    "segfault": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "SIGBUS": signal.SIGBUS,
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "stuck": signal.SIGTERM,
}


EACH = [(how, where) for how in SUDDEN for where in WHERE]


def deaths(folder, asked):
    """Have a process die in each way that is asked for; return the folder, and their exit statuses."""
    command = [sys.executable, str(SCRIPT), str(folder), *(f"{how},{where}" for how, where in asked)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "disabled itself" not in done.stderr, done.stderr
    return folder, json.loads(done.stdout)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    return deaths(tmp_path_factory.mktemp("died"), EACH)


@pytest.mark.parametrize(("how", "where"), EACH)
def test_whatever_ends_the_process_all_that_the_step_had_brought_is_there(died, capsys, how, where):
    folder, statuses = died
    left = folder / f"{how}-{where}"
    assert statuses[left.name] == -SUDDEN[how]
    path, _, collected_steps = steps_of(left)
    assert [(step_data.step, step_data.complete) for step_data in collected_steps][-2:] == [(STEP - 1, True), (STEP, False)]
    assert read_where(path).step == STEP
    assert_brought(collected_steps[-1], where, float(left.with_suffix(".out").read_text()))
    assert main(["black-box", str(left)]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # lines are broken
    assert (UNSURE if how == "SIGKILL" and where == "backward" else PLACES[where]) in shown
    assert ("most recent call first" in shown) == (how != "SIGKILL")


def assert_brought(cut, where, norm):
    """Assert that a step which was cut short has all that came before, and nothing of what did not come."""
    assert len(norms_of(cut, "0")) == 2
    assert norms_of(cut, "0")[1] == pytest.approx(norm, rel=1e-6)
    assert len(norms_of(cut, "1.fc")) == (1 if where == "forward" else 2)
    gradients = [r.site.name for r in cut.records() if r.site.slot == "grad_output.0" and r.step.micro == 1]
    seen = {"forward": [], "backward": [], "inside": ["root", "2", "1", "1.fc"], "optimizer": ["root", "2", "1", "1.fc", "0"]}
    assert gradients == seen[where]
    assert len([r for r in cut.records() if r.site.slot == "grad"]) == (6 if where == "optimizer" else 0)
    assert all(r.values or r.note for r in cut.records())
    assert len(cut.batches) == 2


def test_a_process_that_holds_the_interpreter_in_c_dies_too(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out"), "held", "forward"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as running:
        try:
            norm = float(running.stdout.readline())
            while state_of(running.pid) != "S":  # the only thread that could wake up waits in C
                assert running.poll() is None
            running.terminate()
            assert running.wait(timeout=300) == -signal.SIGTERM
        finally:
            running.kill()
    assert_brought(steps_of(tmp_path / "out")[2][-1], "forward", norm)
    assert "pause" not in (words := last_words(tmp_path / "out/rank0")) and "dies_in_a_step.py" in words


def state_of(process):
    """Return the letter that the system has for what a process does."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("how", ["SIGTERM", "raise"])
def test_of_a_backward_pass_the_last_module_that_it_saw_is_told(tmp_path, capsys, how):
    die(tmp_path / "out", how, "inside")
    assert main(["black-box", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # lines are broken
    assert "pass of micro-batch 1; the last gradient seen was that of 1.fc." in shown


def test_an_error_leaves_the_step_and_where_it_arose(tmp_path, capsys):
    status, norm = die(tmp_path / "out", "raise", "forward")
    assert status == 1
    _, head, collected_steps = steps_of(tmp_path / "out")
    assert (collected_steps[-1].step, collected_steps[-1].complete) == (STEP, False)
    assert norms_of(collected_steps[-1], "0")[1] == pytest.approx(norm, rel=1e-6)
    assert head["where"] in PLACES["forward"]
    assert main(["black-box", str(tmp_path / "out")]) == 0
    assert PLACES["forward"] in capsys.readouterr().out


ESCAPES = """
import sys, torch, trainprobe
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 9), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
probe = trainprobe.Probe(output=sys.argv[1], level="off", monitor=True, black_box=True).open(model, optimizer)
probe.begin_step(3)
model(torch.ones(4, 8))
"""


def test_an_error_that_ends_the_program_within_a_step_leaves_that_step(tmp_path):
    done = subprocess.run([sys.executable, "-c", ESCAPES, str(tmp_path)], env=environment(), capture_output=True, timeout=300)
    assert done.returncode == 1 and b"cannot be multiplied" in done.stderr
    _, head, collected_steps = steps_of(tmp_path)
    assert head["why"] == "RuntimeError ended the program"
    assert head["where"] == "step 3, the forward pass of micro-batch 0, in 2"
    assert [(step_data.step, step_data.complete) for step_data in collected_steps] == [(3, False)]
    assert len(norms_of(collected_steps[0], "1")) == 1 and not norms_of(collected_steps[0], "2")


FORKS = """
import os, signal, sys, torch, trainprobe
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
probe = trainprobe.Probe(output=sys.argv[1], level="off", monitor=True, black_box=True).open(model, optimizer)
probe.begin_step(3)
model(torch.ones(4, 8))
child = os.fork()
if not child:
    model(torch.ones(4, 8))
    probe.end_step()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_child_does_is_no_word_about_its_parent(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], env=environment(), capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    path, _, collected_steps = steps_of(tmp_path)
    assert [(step_data.step, step_data.complete) for step_data in collected_steps] == [(3, False)]
    assert len(norms_of(collected_steps[0], "1")) == 1
    assert read_where(path) == Where(3, 0, AFTER_FORWARD, "")


def test_the_innermost_module_is_told_and_after_an_error_the_one_in_which_it_arose():
    position, seen = Position(), []

    class Info:
        def __init__(self, name):
            self.name = name

    def run(info, original, module, args, kwargs):
        seen.append(position.where().module)
        for inner in args:
            marked(Info(f"{info.name}.{inner}"), original, module, (), kwargs)
            seen.append(position.where().module)
        if info.name.endswith("bad"):
            raise KeyError

    marked = position.around(run)
    position.begins(3)
    marked(Info("a"), None, None, ("b", "c"), {})
    assert seen == ["a", "a.b", "a", "a.c", "a"]
    assert position.where() == Where(3, -1, BEGUN, "")
    with pytest.raises(KeyError):
        marked(Info("a"), None, None, ("bad",), {})
    assert position.where().module == "a.bad"
    position.begins(4)
    assert position.where() == Where(4, -1, BEGUN, "")


def test_a_position_moves_into_memory_that_outlives_it_and_out_again():
    room = bytearray(BYTES)
    position = Position()
    position.begins(7)
    position.keep_in(memoryview(room))
    position.forward(2)
    position.around(lambda *_: None)  # changes nothing yet
    assert read_position(bytes(room)) == Where(7, 2, FORWARD, "")
    position.keep_in(None)
    room.clear()  # nobody holds it any more
    assert position.where() == Where(7, 2, FORWARD, "")


def test_of_a_name_that_is_too_long_the_end_is_kept():
    position, told = Position(), []
    name = "long." * 100 + "é.end"
    position.around(lambda *_: told.append(position.where().module))(type("Info", (), {"name": name}), None, None, (), {})
    assert told[0].startswith("…") and name.endswith(told[0][1:]) and len(told[0]) > 200
