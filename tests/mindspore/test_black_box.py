"""The black box under MindSpore: no bit changes, a good end leaves nothing of it, an error leaves the last steps."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.train import Callback

from tests.mindspore.launch import ENVIRONMENT
from tests.mindspore.tiny import GRAPH, PYNATIVE, Data, train
from trainprobe.cli import main
from trainprobe.errors import FormatError
from trainprobe.integrations.mindformers import ProbeCallback
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box

PLAN = {"level": "off", "sinks": ["jsonl"], "monitor": True, "black_box": True}
ASYNCHRONOUS = "all"


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


class FailsOnce(nn.Cell):
    """Runs what no CPU has a kernel for in its third call; MindSpore raises that later, wherever something waits."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def construct(self, x: Any) -> Any:
        self.calls += 1
        return ms.mint.cumsum(x, 0) if self.calls == 3 else x


class FailsInside(nn.Cell):
    """Raises an error inside a compiled graph in its third call."""

    def __init__(self) -> None:
        super().__init__()
        numbers = count(1)

        def host(array: Any) -> Any:
            if next(numbers) == 3:
                raise RuntimeError("inside the graph")
            return array

        self.call = ms.ops.Custom(host, out_shape=lambda s: s, out_dtype=lambda d: d, func_type="pyfunc")

    def construct(self, x: Any) -> Any:
        return ms.ops.depend(x, self.call(ms.ops.stop_gradient(x)))


def torn(data: Any, i: int) -> Any:
    raise ValueError(f"row {i} is torn")


def fails_with(kind: Any) -> Any:
    def prepare(net: Any) -> None:
        net.blocks[1].act = kind()

    return prepare


@pytest.mark.parametrize(
    ("mode", "where", "prepare", "message", "line"),
    [
        (
            PYNATIVE,
            "operator",
            fails_with(FailsOnce),
            "CumsumExt",
            "step 3, the forward pass of micro-batch 0, in blocks.1.act.",
        ),
        (GRAPH, "graph", fails_with(FailsInside), "inside the graph", "It was at step 3."),
        (PYNATIVE, "data", None, "is torn", "RuntimeError ended the training before its first step"),
    ],
)
def test_an_error_is_told_with_its_step_and_place(
    mode: int, where: str, prepare: Any, message: str, line: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    if where == "data":  # the pipeline reads ahead, and raises what a row raised with the first batch
        monkeypatch.setattr(Data, "__getitem__", torn)
    with pytest.raises(RuntimeError, match=message):
        train(mode, [ProbeCallback(PLAN, output=tmp_path)], prepare=prepare)
    assert main(["black-box", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert line in out
    assert ("3 (cut short)" in out) == (where != "data")


def test_an_error_in_the_optimizer_is_told_as_one(tmp_path: Path, capsys: Any) -> None:
    def failing(net: Any) -> Any:
        numbers, optimizer = count(1), nn.SGD(net.trainable_params(), 0.1)

        def before(cell: Any, args: Any) -> None:
            if next(numbers) == 2:
                raise KeyError("no such group")

        optimizer.register_forward_pre_hook(before)
        return optimizer

    with pytest.raises(KeyError, match="no such group"):
        train(PYNATIVE, [ProbeCallback(PLAN, output=tmp_path)], make_optimizer=failing)
    assert main(["black-box", str(tmp_path)]) == 0
    assert "It was at step 2, the optimizer." in capsys.readouterr().out


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
