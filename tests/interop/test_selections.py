"""What a config.json selects, recorded by both tools: the same calls, and the counts that docs/migration.md shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interop.peer import PEER, needs_peer

pytestmark = needs_peer
ROOT = Path(__file__).resolve().parents[2]
BLOCK, NORM, FC = "Module.layers.1.Block.forward.0", "Module.layers.0.norm.LayerNorm.forward.0", "Module.layers.1.fc.Linear"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "level L0": {"level": "L0"},
    "level L1": {"level": "L1"},
    "no level": {},
    "level mix": {"level": "mix"},
    "L0, scope of two modules": {"level": "L0", "statistics": {"scope": [NORM, f"{FC}.forward.0"]}},
    "L0, scope up to a backward": {"level": "L0", "statistics": {"scope": [NORM, f"{FC}.backward.0"]}},
    "L1, scope of two ops": {
        "level": "L1",
        "statistics": {"scope": ["Functional.layer_norm.0.forward", "Functional.gelu.1.forward"]},
    },
    "mix, scope of two modules": {"level": "mix", "statistics": {"scope": ["Module.layers.0.Block.forward.0", BLOCK]}},
    "L0, list of a part of a name": {"level": "L0", "statistics": {"list": ["fc"]}},
    "L0, list of a class": {"level": "L0", "statistics": {"list": ["Linear"]}},
    "L0, list of a full name": {"level": "L0", "statistics": {"list": [f"{FC}.forward.0"]}},
    "L1, list of a part of a name": {"level": "L1", "statistics": {"list": ["linear"]}},
    "L1, list of a full name": {"level": "L1", "statistics": {"list": ["Functional.linear.1.forward"]}},
    "mix, list of an op": {"level": "mix", "statistics": {"list": ["layer_norm"]}},
    "mix, list of a module": {"level": "mix", "statistics": {"list": [BLOCK]}},
    "mix, list of a part of a module's name": {"level": "mix", "statistics": {"list": ["layers.1"]}},
    "L1, data_mode forward": {"level": "L1", "statistics": {"data_mode": ["forward"]}},
    "L0, data_mode backward": {"level": "L0", "statistics": {"data_mode": ["backward"]}},
    "L1, data_mode backward and input": {"level": "L1", "statistics": {"data_mode": ["backward", "input"]}},
}
OURS_ALONE = {
    "Module.root.Net.forward.0": "the model itself",
    "Module.root.Net.backward.0": "the model itself",
    "Module.layers.1.Block.backward.0": "begins in the stretch and ends behind it",
}


def entries(python: str, who: str, folder: Path) -> list[list[str]]:
    """Return the names of the calls of step 0 for each configuration."""
    texts = [json.dumps({"task": "statistics", **config}) for config in CONFIGURATIONS.values()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests/interop/train_small.py")
    done = subprocess.run(
        [python, script, who, str(folder), *texts], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    dumps = [next((folder / str(i)).glob("step0/*/dump.json")) for i in range(len(texts))]
    return [list(json.loads(path.read_text())["data"]) for path in dumps]


def test_a_configuration_selects_the_same_calls_in_both_tools(tmp_path):
    theirs, ours = entries(str(PEER), "msprobe", tmp_path / "theirs"), entries(sys.executable, "classic", tmp_path / "ours")
    rows = ["| configuration | calls there | calls here | here alone |", "|---|---|---|---|"]
    for name, there, here in zip(CONFIGURATIONS, theirs, ours, strict=True):
        called = {entry.replace("__mul__", "mul").replace("__add__", "add") for entry in there}
        assert called - set(here) == set(), name
        alone = [entry for entry in here if entry not in called]
        assert set(alone) <= OURS_ALONE.keys(), name
        rows.append(
            f"| {name} | {len(there)} | {len(here)} | {', '.join(dict.fromkeys(OURS_ALONE[entry] for entry in alone))} |"
        )
    table = "\n".join(rows)
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    assert table in page or pytest.fail(f"docs/migration.md does not show what was measured:\n{table}")
