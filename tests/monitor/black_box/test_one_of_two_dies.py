"""One of two ranks is killed: both boxes are readable and say what each rank had come to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson

from tests.distributed.launch import ONE_RANK, free_port
from tests.monitor.black_box.one_of_two_dies import STEP
from trainprobe.cli import main
from trainprobe.engine.storage.dumps.record_log import decode
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("one_of_two_dies.py")


def start(rank, port, folder):
    told = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **told, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ONE_RANK), str(SCRIPT), str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_the_rank_that_was_killed_and_the_one_that_waits_for_it_tell_what_they_had_seen(tmp_path, capsys):
    port = free_port()
    running = [start(rank, port, tmp_path / "out") for rank in (0, 1)]
    try:
        assert running[1].wait(timeout=300) == -signal.SIGKILL
        assert running[0].stdout.readline() == "in the step\n"
        try:
            running[0].wait(timeout=20)  # the collective fails, or waits for ever
        except subprocess.TimeoutExpired:
            running[0].terminate()
            assert running[0].wait(timeout=300) == -signal.SIGTERM
    finally:
        for process in running:
            process.kill()
            process.stdout.close()
    boxes = {path.parent.name: path for path in find_boxes(tmp_path / "out")}
    assert set(boxes) == {"rank0", "rank1"}
    for rank, path in boxes.items():
        collected_steps = [decode(orjson.dumps(step["reel"])) for step in read_box(path)[1]]
        assert [(step_data.step, step_data.complete) for step_data in collected_steps][-2:] == [(STEP - 1, True), (STEP, False)]
        assert collected_steps[-1].place.rank == int(rank[-1])
        inputs = [
            r for r in collected_steps[-1].records() if (r.site.name, r.site.slot, r.step.phase) == ("0", "input.0", "forward")
        ]
        outputs = [
            r for r in collected_steps[-1].records() if (r.site.name, r.site.slot, r.step.phase) == ("1", "output", "forward")
        ]
        assert len(inputs) == 1 and "norm" in inputs[0].values
        assert len(outputs) == (rank == "rank0")
    assert main(["black-box", str(tmp_path / "out")]) == 0
    assert f"It was at step {STEP}, the forward pass of micro-batch 0, in 1." in " ".join(capsys.readouterr().out.split())
