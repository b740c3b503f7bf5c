"""What a config.json selects, recorded by each release and by trainprobe: the same calls; the table in docs/migration.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.interop.peer import OLDER, PEER, needs_older, needs_peer

pytestmark = [needs_peer, needs_older]
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
# calls that the program does not make: hooks of those releases, and what `backward` begins with
OWN = re.compile(r"Tensor\.view_as\.\d+\.forward|Torch\.ones_like\.0\.forward")
Recorded = list[str]  # names of calls
ENDS = "a scope of 1.3.0 and 8.1.1 leaves out the last module at L0, and goes on to its end at mix"
OLDER_DIFFER = {"L0, scope of two modules": ENDS, "mix, scope of two modules": ENDS}


def entries(python: str, who: str, folder: Path) -> list[Recorded]:
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


def as_here(name: str) -> str:
    """Return the name of a call as trainprobe writes it."""
    return re.sub(r"(?<=\.parameters_grad)$", ".0", name.replace("__mul__", "mul").replace("__add__", "add"))


def table(theirs: dict[str, list[Recorded]], ours: list[Recorded]) -> str:
    """Return the table of docs/migration.md. theirs: by release. Calls that one side lacks without a known reason fail."""
    rows = [f"| configuration | {' | '.join(theirs)} | here | why not the same |", "|---" * (len(theirs) + 3) + "|"]
    for i, (name, here) in enumerate(zip(CONFIGURATIONS, ours, strict=True)):
        counts: list[int] = []
        why: list[str] = []
        for release, recorded in theirs.items():
            there = {as_here(entry) for entry in recorded[i] if release not in OLDER or not OWN.fullmatch(entry)}
            counts.append(len(there))
            if release in OLDER and name in OLDER_DIFFER:
                why.append(OLDER_DIFFER[name])
                continue
            assert there - set(here) == set(), (name, release)
            alone = [entry for entry in here if entry not in there]
            assert set(alone) <= OURS_ALONE.keys(), (name, release)
            why += [OURS_ALONE[entry] for entry in alone]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {len(here)} | {', '.join(dict.fromkeys(why))} |")
    return "\n".join(rows)


@pytest.mark.timeout(1800)
def test_a_configuration_selects_the_same_calls_in_both_tools(tmp_path):
    pythons = {**OLDER, "26.2.0": str(PEER), "ours": sys.executable}
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            name: pool.submit(entries, python, "classic" if name == "ours" else "msprobe", tmp_path / name)
            for name, python in pythons.items()
        }
    recorded = {name: job.result() for name, job in jobs.items()}
    measured = table({name: calls for name, calls in recorded.items() if name != "ours"}, recorded["ours"])
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    assert measured in page or pytest.fail(f"docs/migration.md does not show what was measured:\n{measured}")
