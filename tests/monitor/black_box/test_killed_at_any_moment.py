"""Wherever `kill -9` meets a training, the box can be read and says of the step in progress what an undisturbed run says."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson

from tests.engine.storage.journal_of_a_step import told
from trainprobe.cli import main
from trainprobe.engine.storage.dumps.record_log import decode
from trainprobe.engine.storage.step_journal import read_journal
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box
from trainprobe.monitor.black_box.ring import read_journal_bytes, read_where

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("killed_at_any_moment.py")
KILLS = 4


def run(*arguments, **how):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], env=environment, stdout=subprocess.PIPE, text=True, **how
    )


def killed(folder):
    """Kill a training at a moment that nobody knows; return the ring that it left."""
    with run(str(folder)) as training:
        try:
            assert training.stdout.readline() == "it trains\n"
            time.sleep(random.uniform(0, 0.1))  # whenever it is: all must hold at any moment
        finally:
            training.kill()
    assert training.returncode == -signal.SIGKILL
    (path,) = find_boxes(folder)
    return path


def test_wherever_a_training_is_killed_the_box_tells_the_truth(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # the headings of the table stand on one line, however long its numbers are
    rings = [killed(tmp_path / f"{i}") for i in range(KILLS)]
    left = [read_journal(read_journal_bytes(ring)) for ring in rings]
    steps = sorted({found[0].step for found in left if found is not None})
    with run(str(tmp_path / "whole"), *map(str, steps or [0])) as undisturbed:
        whole = json.loads(undisturbed.stdout.read().splitlines()[-1])
    for ring, found in zip(rings, left, strict=True):
        boxed = [decode(orjson.dumps(step["reel"])) for step in read_box(ring)[1]]
        complete = [step_data.step for step_data in boxed if step_data.complete]
        assert complete == list(range(complete[0], complete[-1] + 1)) and len(complete) >= 3
        assert read_where(ring).step in (complete[-1], complete[-1] + 1)
        if found is not None:
            journal, step_data = told(found[0]), whole[str(found[0].step)]
            assert found[0].step in (complete[-1], complete[-1] + 1)
            assert set(journal["calls"]) <= set(step_data["calls"])
            assert journal["scalars"].items() <= step_data["scalars"].items()
            assert set(journal["records"]) <= set(step_data["records"])
        assert main(["black-box", str(ring)]) == 0
    assert "random state" in capsys.readouterr().out
