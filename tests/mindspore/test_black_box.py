"""The black box under MindSpore: it changes nothing, and a good end leaves nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mindspore.tiny import PYNATIVE, train
from trainprobe.errors import FormatError
from trainprobe.integrations.mindformers import ProbeCallback
from trainprobe.monitor.black_box.black_box_command import find_boxes


def test_a_good_end_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = {"level": "off", "sinks": ["jsonl"], "monitor": True, "black_box": True, "output": str(tmp_path)}
    assert train(PYNATIVE, [ProbeCallback(plan)]).bits == train(PYNATIVE).bits
    assert "steps of each rank are kept" in capfd.readouterr().err
    with pytest.raises(FormatError, match="ended well"):
        find_boxes(tmp_path)
