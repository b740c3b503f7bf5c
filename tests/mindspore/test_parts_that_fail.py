"""A tap that fails in the middle of a MindSpore training costs that tap, and neither the others nor a bit of the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mindspore.tiny import PYNATIVE, train
from trainprobe.engine.capture.mindspore.cells import CellTap
from trainprobe.engine.capture.mindspore.ops import PrimitiveTap
from trainprobe.engine.capture.mindspore.states import CellStateTap
from trainprobe.integrations.mindformers import ProbeCallback
from trainprobe.monitor.audit.capture.mindspore_tap import CellAuditTap

PLAN = {"level": "mix", "step": [2], "monitor": True, "audit": {"every": 1}, "sinks": ["dump"]}


def breaks(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(
    ("kind", "method", "part"),
    [
        (CellTap, "_enter", "the tap CellTap"),
        (CellTap, "_leave", "the tap CellTap"),
        (PrimitiveTap, "_before", "the tap PrimitiveTap"),
        (CellStateTap, "moment", "the tap CellStateTap"),
        (CellAuditTap, "before_update", "the audit"),
        (CellAuditTap, "take", "the audit"),
    ],
)
def test_a_tap_that_fails_costs_that_tap(kind: Any, method: str, part: str, tmp_path: Path, monkeypatch: Any) -> None:
    bare = train(PYNATIVE, [])
    monkeypatch.setenv("TRAINPROBE_ON_ERROR", "continue")
    monkeypatch.setattr(kind, method, breaks)
    callback = ProbeCallback({**PLAN, "output": str(tmp_path / "out"), "on_error": "continue"})
    assert train(PYNATIVE, [callback]).bits == bare.bits
    told = [finding.message for finding in callback.findings if "broken on purpose" in finding.message]
    assert len(told) == 1 and told[0].startswith(f"{part} failed and is left out from here on")
    assert "disabled itself" not in " ".join(finding.message for finding in callback.findings)
    recorded = {call.partition(".")[0] for call in json.loads((tmp_path / "out/step2/rank0/dump.json").read_text())["data"]}
    lost = {CellTap: "Cell", PrimitiveTap: "Primitive"}.get(kind)
    assert {"Cell", "Primitive"} - {lost} <= recorded
