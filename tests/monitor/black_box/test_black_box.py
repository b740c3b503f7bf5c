"""The black box: written on a grave finding or an error, left behind by a killed process, absent after a good end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import torch

import trainprobe
from trainprobe.cli import main
from trainprobe.errors import FormatError
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box
from trainprobe.monitor.black_box.ring import Ring, read_ring

ROOT = Path(__file__).parents[3]


def train(folder, steps=6, fail=None, nan=None, **plan):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"level": "L0", "step": [1000], "monitor": True, "audit": {"every": 1}, "black_box": True, **plan}
    with trainprobe.watch(model, optimizer, output=folder, **options) as probe:
        for step in range(steps):
            with probe.step():
                optimizer.zero_grad()
                loss = model(torch.randn(4, 3)).square().mean() * (float("nan") if step == nan else 1)
                if step == fail:
                    raise KeyError("the data ran out")
                probe.note("loss", loss)
                loss.backward()
                optimizer.step()


def test_a_run_that_ends_well_leaves_no_box(tmp_path):
    train(tmp_path / "out")
    with pytest.raises(FormatError, match="ended well"):
        find_boxes(tmp_path / "out")


def test_an_error_in_the_training_writes_the_last_steps_and_says_how_to_read_them(tmp_path, capsys):
    with pytest.raises(KeyError):
        train(tmp_path / "out", fail=4, black_box={"steps": 3})
    head, steps = read_box(find_boxes(tmp_path / "out")[0])
    assert [step["reel"]["step"] for step in steps] == [2, 3, 4]
    assert steps[-1]["reel"]["complete"] is False
    assert "ended" in head["why"]
    assert "trainprobe black-box" in capsys.readouterr().err


def test_a_grave_finding_writes_the_box_and_the_next_step_is_dumped_in_full(tmp_path):
    train(tmp_path / "out", nan=3)
    head, steps = read_box(find_boxes(tmp_path / "out")[0])
    assert steps[-1]["reel"]["step"] == 3
    assert any(f["rule"] == "nonfinite" for f in head["findings"])
    assert (tmp_path / "out" / "step4" / "rank0" / "dump.json").exists()


def test_steps_hold_batches_and_the_random_state_to_go_back_to(tmp_path):
    with pytest.raises(KeyError):
        train(tmp_path / "out", fail=4)
    _, steps = read_box(find_boxes(tmp_path / "out")[0])
    assert len({step["facts"]["batches"][0] for step in steps if step["facts"]["batches"]}) == 5
    assert all(step["facts"]["random_states"] for step in steps)


def test_a_killed_process_leaves_its_last_steps(tmp_path):
    code = f"""
import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_black_box import train
from pathlib import Path
train(Path({str(tmp_path / "out")!r}), steps=100000)
"""
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    ring = tmp_path / "out" / "rank0" / "black_box.ring"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (ring.exists() and ring.stat().st_size and len(read_ring(ring)) >= 5):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    _, steps = read_box(find_boxes(tmp_path / "out")[0])
    numbers = [step["reel"]["step"] for step in steps]
    assert len(numbers) >= 5
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_ring_keeps_the_newest_pieces_and_its_size(tmp_path):
    ring = Ring(tmp_path / "r.ring", 4, 1 << 16)
    for i in range(11):
        assert ring.put(orjson.dumps({"i": i}))
    assert [orjson.loads(piece)["i"] for piece in read_ring(ring.path)] == [7, 8, 9, 10]
    large = orjson.dumps({"i": "a" * (1 << 15)})  # does not fit a slot unless it is compressed
    assert ring.put(large)
    assert read_ring(ring.path)[-1] == large
    assert not ring.put(os.urandom(1 << 16))
    assert ring.path.stat().st_size <= 1 << 16


def test_a_torn_slot_is_left_out(tmp_path):
    ring = Ring(tmp_path / "r.ring", 2, 1 << 12)
    ring.put(b"first")
    ring.put(b"second")
    data = bytearray(ring.path.read_bytes())
    data[data.index(b"first")] ^= 1
    ring.path.write_bytes(data)
    assert read_ring(ring.path) == [b"second"]


def test_the_command_shows_a_box(tmp_path, capsys):
    with pytest.raises(KeyError):
        train(tmp_path / "out", fail=4)
    assert main(["black-box", str(tmp_path / "out")]) == 0
    assert "cut short" in capsys.readouterr().out


def test_an_unknown_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        train(tmp_path / "out", black_box={"step": 3})
