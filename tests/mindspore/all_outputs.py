"""A plan file that asks for dump, monitor, audit and configuration, and what is there of them after a run."""

from __future__ import annotations

from pathlib import Path

import yaml

from trainprobe.config_check.pack_reader import read_pack
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.engine.storage.dumps.read import read
from trainprobe.monitor.run_folder import read_frames


def plan_file(folder: Path, dumped: int) -> Path:
    """Write a plan with a dump of step `dumped`, a monitor and an audit of every step, and the capture of the configuration."""
    plan = {
        "output": str(folder / "out"),
        "level": "mix",
        "step": [dumped],
        "monitor": True,
        "audit": {"every": 1},
        "config_check": {"micro_steps": 2},
        "on_error": "raise",
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def assert_all_outputs(folder: Path, *, dumped: int, steps: list[int], cell: str, found: tuple[str, int, str]) -> None:
    """Assert that a run of that plan left a dump, the monitor's numbers, the audit's finding and a pack.

    cell: the name of one of the model. found: relation, step and name of what was planted.
    """
    output = folder / "out"
    step_data = read(output / f"step{dumped}" / "rank0")
    assert {"module", "op"} <= {call.kind for call in step_data.calls}
    assert {call.phase for call in step_data.calls if call.name == cell} == {"forward", "backward"}
    frames = {frame.step: frame for frame in read_frames(output)}
    assert list(frames) == steps
    assert found in [(f.rule, f.step, f.site.name) for f in read_findings(output) if f.site is not None]
    pack = read_pack(output / "config_check_pack.zip")
    assert pack.complete
    assert pack.micro_steps == 2
    assert set(pack.captures) == {"environment", "packages", "hyperparameters", "dataset", "weights"}
    assert all(pack.has(capture) for capture in pack.captures)
