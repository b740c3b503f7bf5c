"""The black box under MindSpore: no bit changes, a good end leaves nothing of it, an error leaves the last steps."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mindspore.train import Callback

from tests.mindspore.launch import ENVIRONMENT
from tests.mindspore.tiny import PYNATIVE, train
from trainprobe.errors import FormatError
from trainprobe.integrations.mindformers import ProbeCallback
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box

PLAN = {"level": "off", "sinks": ["jsonl"], "monitor": True, "black_box": True}


class Fails(Callback):
    """Raises an error of its own when step 3 has ended."""

    def on_train_step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 3:
            raise KeyError("the disk with the checkpoints is gone")


def test_a_good_end_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(PYNATIVE, [ProbeCallback(PLAN, output=tmp_path)]).bits == train(PYNATIVE).bits
    assert "steps of each rank are kept" in capfd.readouterr().err
    with pytest.raises(FormatError, match="ended well"):
        find_boxes(tmp_path)


@pytest.mark.parametrize("first", [False, True])
def test_an_error_of_another_callback_leaves_the_last_steps(tmp_path: Path, first: bool) -> None:
    callbacks = [ProbeCallback(PLAN, output=tmp_path), Fails()]
    with pytest.raises(KeyError, match="checkpoints"):
        train(PYNATIVE, callbacks[::-1] if first else callbacks)
    (path,) = find_boxes(tmp_path)
    head, steps = read_box(path)
    assert head["why"] == "KeyError ended the training after step 3"
    told = [(step["reel"]["step"], step["reel"]["complete"]) for step in steps]
    assert told == [(1, True), (2, True), (3, not first)]  # where the other comes first, the step has not ended for the probe
    assert all(step["reel"]["rows"] > 10 for step in steps)


KILLED = """
import os, signal, sys
import mindspore as ms
from mindspore.train import Callback
from tests.mindspore.test_black_box import PLAN
from tests.mindspore.tiny import PYNATIVE, train
from trainprobe.integrations.mindformers import ProbeCallback

class Kills(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            os.kill(os.getpid(), signal.SIGKILL)

ms.set_device("CPU")
train(PYNATIVE, [Kills(), ProbeCallback(PLAN, output=sys.argv[1])])
"""


def test_a_process_that_is_killed_leaves_what_its_step_had_brought(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=ENVIRONMENT, capture_output=True, timeout=540)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-3000:]
    (path,) = find_boxes(tmp_path)
    *before, cut = [step["reel"] for step in read_box(path)[1]]
    assert [(step_data["step"], step_data["complete"]) for step_data in (*before, cut)] == [(1, True), (2, True), (3, False)]
    assert cut["rows"] == before[-1]["rows"]
    assert sorted(cut["partials"]) == sorted(before[-1]["partials"])
