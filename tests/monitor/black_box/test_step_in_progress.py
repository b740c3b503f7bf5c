"""A process that dies within a step: where it was is told, and where it dies in good health, all that the step had brought."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from trainprobe.cli import main
from trainprobe.engine.dumps.record_log import decode
from trainprobe.engine.position import BEGUN, BYTES, FORWARD, Position, Where, read_position
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box
from trainprobe.monitor.black_box.ring import read_where

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("dies_in_a_step.py")
STEP = 5
PLACES = {
    "forward": f"It was at step {STEP}, the forward pass of micro-batch 1, in 1.fc.",
    "backward": f"It was at step {STEP}, the backward pass of micro-batch 1.",
    "optimizer": f"It was at step {STEP}, the optimizer.",
}


def die(folder, how, where):
    """Train in a process until it dies; return its exit status and the norm that it printed last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONFAULTHANDLER", None)
    command = [sys.executable, str(SCRIPT), str(folder), how, where]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    assert "disabled itself" not in done.stderr
    return done.returncode, float(done.stdout)


def steps_of(folder):
    """Return the box, and the steps in it as reels."""
    (path,) = find_boxes(folder)
    head, steps = read_box(path)
    return path, head, [decode(orjson.dumps(step["reel"])) for step in steps]


def norms_of(reel, name):
    return [
        record.values["norm"]
        for record in reel.records()
        if (record.site.kind, record.site.name, record.site.slot) == ("module", name, "output")
    ]


@pytest.mark.parametrize(
    ("how", "where", "status"),
    [
        ("segfault", "forward", signal.SIGSEGV),
        ("segfault", "backward", signal.SIGSEGV),
        ("abort", "optimizer", signal.SIGABRT),
        ("SIGKILL", "forward", signal.SIGKILL),
    ],
)
def test_after_a_sudden_death_it_is_told_where_in_the_step_the_process_was(tmp_path, capsys, how, where, status):
    assert die(tmp_path / "out", how, where)[0] == -status
    path, _, reels = steps_of(tmp_path / "out")
    assert reels[-1].step == STEP - 1 and reels[-1].complete
    assert read_where(path).step == STEP
    assert main(["black-box", str(tmp_path / "out")]) == 0
    assert PLACES[where] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "where"), [("SIGTERM", "forward"), ("SIGTERM", "backward"), ("SIGTERM", "optimizer"), ("stuck", "forward")]
)
def test_sigterm_leaves_all_that_the_step_had_brought(tmp_path, capsys, how, where):
    status, norm = die(tmp_path / "out", how, where)
    assert status == -signal.SIGTERM
    _, _, reels = steps_of(tmp_path / "out")
    cut = reels[-1]
    assert (cut.step, cut.complete) == (STEP, False)
    assert len(norms_of(cut, "0")) == 2
    assert norms_of(cut, "0")[1] == pytest.approx(norm, rel=1e-6)
    assert len(norms_of(cut, "1.fc")) == (1 if where == "forward" else 2)
    updated = [record for record in cut.records() if record.site.slot == "grad"]
    assert len(updated) == (6 if where == "optimizer" else 0)
    assert main(["black-box", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert PLACES[where] in shown and "SIGTERM" in shown and "most recent call first" in shown


@pytest.mark.parametrize("how", ["SIGTERM", "raise"])
def test_of_a_backward_pass_the_last_module_that_it_saw_is_told(tmp_path, capsys, how):
    die(tmp_path / "out", how, "inside")
    assert main(["black-box", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # lines are broken
    assert "pass of micro-batch 1; the last gradient seen was that of 1.fc." in shown


def test_an_error_leaves_the_step_and_where_it_arose(tmp_path, capsys):
    status, norm = die(tmp_path / "out", "raise", "forward")
    assert status == 1
    _, head, reels = steps_of(tmp_path / "out")
    assert (reels[-1].step, reels[-1].complete) == (STEP, False)
    assert norms_of(reels[-1], "0")[1] == pytest.approx(norm, rel=1e-6)
    assert head["where"] in PLACES["forward"]
    assert main(["black-box", str(tmp_path / "out")]) == 0
    assert PLACES["forward"] in capsys.readouterr().out


SLOW = """
import os, signal, sys, time
from pathlib import Path
from trainprobe.monitor.black_box import last_words
last_words.SECONDS = 0.5
words = last_words.LastWords(Path(sys.argv[1]), lambda: time.sleep(600))
os.kill(os.getpid(), signal.SIGTERM)
words.close() if sys.argv[2] == "closes" else time.sleep(600)
"""


@pytest.mark.parametrize("goes_on", ["waits", "closes"])
def test_what_cannot_be_written_in_time_does_not_keep_the_process_alive(tmp_path, goes_on):
    done = subprocess.run(
        [sys.executable, "-c", SLOW, str(tmp_path), goes_on], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert done.returncode == -signal.SIGTERM
    assert b"most recent call first" in (tmp_path / "black_box.terminated").read_bytes()


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
