"""`trainprobe kernel-dump configure`: what MindSpore's dump is told, and what it cannot be told is a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainprobe.cli import main
from trainprobe.engine.plan.loading import load_plan
from trainprobe.errors import PlanError
from trainprobe.kernel_dump.settings import dump_settings


def common(device: str = "ascend", **plan: Any) -> dict[str, Any]:
    return dump_settings(load_plan(plan), device)["common_dump_settings"]


@pytest.mark.parametrize(
    ("step", "iteration"),
    [("all", "all"), (3, "3"), (["5-8", 20], "5-8|20"), ("every 50 from 100 to 200", "100|150|200")],
)
def test_steps(step: Any, iteration: str) -> None:
    assert common(step=step)["iteration"] == iteration


def test_operators_inputs_devices_and_statistics(tmp_path: Path) -> None:
    found = common(
        output=tmp_path / "out", ops=["Kernel.MatMul", "Primitive.Add"], data=["input"], rank=[1, 3], statistics=["mean", "inf"]
    )
    assert found["path"] == str(tmp_path / "out")
    assert (found["dump_mode"], found["kernels"]) == (1, ["MatMul", "Add"])
    assert (found["input_output"], found["support_device"]) == (1, [1, 3])
    assert found["saved_data"] == "statistic"
    assert found["statistic_category"] == ["avg", "negative inf count", "positive inf count"]
    assert common()["dump_mode"] == 0 and common("cpu")["saved_data"] == "tensor" == common(task="tensor")["saved_data"]
    assert dump_settings(load_plan({}), "ascend", True)["e2e_dump_settings"]["enable"] is False


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"step": "every 50"}, "has no end"),
        ({"modules": ["layers.0"]}, "selects by kernel"),
        ({"ops": ["Kernel.*"]}, "is no type of operator"),
        ({"rank": [64]}, "0 to 7"),
        ({"statistics": ["std"]}, "std is none of MindSpore's dump"),
    ],
)
def test_what_cannot_be_said(plan: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        common(**plan)


def test_a_config_of_level_l2_is_taken_and_nothing_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"task": "statistics", "dump_path": str(tmp_path / "out"), "level": "L2", "step": [2], "rank": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["kernel-dump", "configure", str(tmp_path / "config.json"), "-o", str(tmp_path / "settings.json")]
    assert main(words) == 0
    assert f"MINDSPORE_DUMP_CONFIG={tmp_path / 'settings.json'} python train.py" in capsys.readouterr().out
    written = json.loads((tmp_path / "settings.json").read_text())["common_dump_settings"]
    assert (written["iteration"], written["path"]) == ("2", str(tmp_path / "out"))
    assert main(words) != 0
    assert "was not written" in capsys.readouterr().err
