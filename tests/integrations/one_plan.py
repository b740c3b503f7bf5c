"""A plan file that asks for all four outputs, and what is there of them after a run, read by the tool's own readers."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from tests.integrations.records import recorded
from trainprobe.config_check.pack import Pack
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
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def assert_all_outputs(folder: Path, *, dumped: int, steps: list[int], layer: str, written: tuple[int, str]) -> None:
    """Assert that a run of that plan left a dump, the monitor's numbers, the audit's finding and a pack.

    layer: a module of the model. written: a step, and the parameter that somebody wrote to before it.
    """
    output = folder / "out"
    step_data = read(output / f"step{dumped}" / "rank0")
    assert {"module", "op"} <= {call.kind for call in step_data.calls}
    assert {call.phase for call in step_data.calls if call.name == layer} == {"forward", "backward"}
    frames = {frame.step: frame for frame in read_frames(output)}
    assert list(frames) == steps
    assert all(any(name.endswith(" grad") for name in numbers) for numbers in recorded(output).values())
    found = [(f.rule, f.step, f.site.name) for f in read_findings(output) if f.site is not None]
    assert ("untouched_between_steps", *written) in found
    pack = finished_pack(output / "config_check_pack.zip")
    assert pack.micro_steps == 2
    assert all(pack.has(capture) for capture in pack.captures)


def finished_pack(path: Path, patience: float = 60) -> Pack:
    """Return a pack once it is complete; it is written on a thread of its own."""
    end = time.monotonic() + patience
    while not (path.exists() and read_pack(path).complete) and time.monotonic() < end:
        time.sleep(0.05)
    return read_pack(path)
