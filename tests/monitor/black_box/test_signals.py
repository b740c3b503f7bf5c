"""Real fatal signals, in real processes: the last collected steps are on disk, and the process dies as it would have died."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainprobe.cli import main
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box
from trainprobe.monitor.black_box.last_words import FAULT_FILE, TERMINATED_FILE, LastWords, last_words

ROOT = Path(__file__).parents[3]
KEPT = 6
TRAIN = """
import os, sys, signal, time
import torch, trainprobe
folder, how, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests under nohup has it ignored
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
plan = {"level": "off", "sinks": ["parquet"], "monitor": True, "black_box": {"steps": int(sys.argv[4])}}
with trainprobe.watch(model, optimizer, output=folder, on_existing="continue", **plan) as probe:
    for step in range(10**9):
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * (step + 1)
        with probe.step(step):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            probe.note("loss", loss)
            loss.backward()
            optimizer.step()
        if step == last:  # at once, while the writer's thread may still be behind
            print("last step", flush=True)
            if how == "abort":
                os.abort()
            if how == "segfault":
                import ctypes
                ctypes.string_at(0)
            if how == "raise":
                raise KeyError("the data ran out")
            if how == "exit":
                sys.exit(0)
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(600)
"""


def die(folder, how, last=20):
    """Train in a process until it dies after step `last`; return its exit status and what it wrote to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONFAULTHANDLER", None)
    command = [sys.executable, "-c", TRAIN, str(folder), how, str(last), str(KEPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "last step" in done.stdout, done.stderr
    return done.returncode, done.stderr


SIGNALS = {
    "abort": signal.SIGABRT,
    "segfault": signal.SIGSEGV,
    "SIGTERM": signal.SIGTERM,
    "SIGKILL": signal.SIGKILL,
    "SIGHUP": signal.SIGHUP,
}


@pytest.mark.parametrize("how", SIGNALS)
def test_after_a_fatal_signal_the_last_steps_are_on_disk(tmp_path, how, capsys):
    status, told = die(tmp_path / "out", how)
    assert status == -SIGNALS[how]
    (path,) = find_boxes(tmp_path / "out")
    _, steps = read_box(path)
    assert [step["reel"]["step"] for step in steps][-KEPT:] == list(range(21 - KEPT, 21))
    for step in steps:
        assert step["reel"]["scalars"]["lr"] == pytest.approx(0.001 * (step["reel"]["step"] + 1))
        assert step["facts"]["random_states"] and len(step["facts"]["batches"]) == 1
        assert "loss" in step["reel"]["scalars"] and step["reel"]["rows"] > 10
    assert len({step["facts"]["batches"][0] for step in steps}) == len(steps)
    assert f"`trainprobe black-box {tmp_path / 'out'}`" in told
    assert main(["black-box", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    expected = {"abort": "Aborted", "segfault": "Segmentation fault", "SIGTERM": "SIGTERM"}
    assert expected.get(how, "the process was killed while it ran") in shown
    assert ("most recent call first" in shown) == (how in expected)


def test_the_random_state_is_the_one_to_go_on_from(tmp_path):
    import base64
    import zlib

    import torch

    die(tmp_path / "out", "SIGKILL")
    _, steps = read_box(find_boxes(tmp_path / "out")[0])
    states = [
        torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(s["facts"]["random_states"][0]))), dtype=torch.uint8)
        for s in steps
    ]
    before = torch.get_rng_state()
    try:
        torch.set_rng_state(states[0])
        torch.randn(4, 8)
        assert torch.equal(torch.get_rng_state(), states[1])
    finally:
        torch.set_rng_state(before)


def test_an_error_that_ends_the_program_leaves_the_box_and_a_good_end_leaves_nothing(tmp_path):
    status, told = die(tmp_path / "bad", "raise")
    assert status == 1
    head, steps = read_box(find_boxes(tmp_path / "bad")[0])
    assert "KeyError" in head["why"]
    assert [step["reel"]["step"] for step in steps] == list(range(21 - KEPT, 21))
    assert "read them with `trainprobe black-box" in told
    die(tmp_path / "good", "exit")
    assert not [path for path in (tmp_path / "good").rglob("black_box*") if path.suffix != ".jsonl"]


def test_a_run_that_follows_in_the_same_place_leaves_the_box_of_the_one_that_died(tmp_path):
    die(tmp_path / "out", "SIGTERM", last=7)
    die(tmp_path / "out", "SIGKILL", last=9)
    boxes = {path.parent.name: read_box(path)[1][-1]["reel"]["step"] for path in find_boxes(tmp_path / "out")}
    assert boxes == {"rank0": 9, "black_box_before": 7}
    assert last_words(tmp_path / "out/rank0/black_box_before").startswith("SIGTERM")
    assert last_words(tmp_path / "out/rank0") is None


OWN = """
import os, signal, sys
from pathlib import Path
from trainprobe.monitor.black_box.last_words import LastWords
def mine(number, frame): print("mine", flush=True)
when = sys.argv[2]
if when == "before": signal.signal(signal.SIGTERM, mine)
words = LastWords(Path(sys.argv[1]))
if when == "after": signal.signal(signal.SIGTERM, mine)
if when == "closed": signal.signal(signal.SIGTERM, mine); words.close()
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
"""


@pytest.mark.parametrize("when", ["before", "after", "closed"])
def test_a_handler_of_ones_own_still_runs(tmp_path, when):
    done = subprocess.run(
        [sys.executable, "-c", OWN, str(tmp_path), when],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mine", "alive"]


FORK = """
import os, signal, sys, time
from pathlib import Path
from trainprobe.monitor.black_box.last_words import LastWords
words = LastWords(Path(sys.argv[1]))
ready, told = os.pipe()
child = os.fork()
if child == 0:
    os.write(told, b"1")
    time.sleep(600)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
words.close()
"""


def test_a_child_that_is_terminated_says_nothing_about_its_parent(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(-signal.SIGTERM)], done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_fault_handler_that_is_on_already_stays_as_it_is(tmp_path):
    assert faulthandler.is_enabled()  # pytest has switched it on
    words = LastWords(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {TERMINATED_FILE}
    words.close()
    assert faulthandler.is_enabled()
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path / FAULT_FILE).exists()


def test_a_disk_without_room_is_an_error_at_the_start(tmp_path):
    from trainprobe.errors import OutputError
    from trainprobe.monitor.black_box.ring import Ring

    with pytest.raises(OutputError, match="make room, or lower `max_bytes`"):
        Ring(tmp_path / "r.ring", 4, 1 << 60)
    assert not (tmp_path / "r.ring").exists()
