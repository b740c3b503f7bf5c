"""What a config.json selects, recorded by each release and by trainprobe: the same calls; the table in docs/migration.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    "L1, scope and list": {
        "level": "L1",
        "statistics": {"scope": ["Functional.layer_norm.0.forward", "Functional.gelu.1.forward"], "list": ["linear"]},
    },
    "mix, list of a class": {"level": "mix", "statistics": {"list": ["LayerNorm"]}},
    "mix, list of a part of a name with a number": {"level": "mix", "statistics": {"list": ["layers.0.fc"]}},
    "L1, data_mode forward": {"level": "L1", "statistics": {"data_mode": ["forward"]}},
    "L0, data_mode backward": {"level": "L0", "statistics": {"data_mode": ["backward"]}},
    "L1, data_mode input": {"level": "L1", "statistics": {"data_mode": ["input"]}},
    "L1, data_mode output": {"level": "L1", "statistics": {"data_mode": ["output"]}},
    "L1, data_mode backward and output": {"level": "L1", "statistics": {"data_mode": ["backward", "output"]}},
    "L0, data_mode input": {"level": "L0", "statistics": {"data_mode": ["input"]}},
    "L0, data_mode output": {"level": "L0", "statistics": {"data_mode": ["output"]}},
    "L1, data_mode backward and input": {"level": "L1", "statistics": {"data_mode": ["backward", "input"]}},
}
FULL = "Module.layers.1.fc.Linear"
SAVED: dict[str, dict[str, Any]] = {
    "L1, an op": {"level": "L1", "tensor_list": ["linear"]},
    "L1, two ops": {"level": "L1", "tensor_list": ["gelu", "layer_norm"]},
    "L1, a full name": {"level": "L1", "tensor_list": ["Functional.linear.1.forward"]},
    "L1, an op, beside md5": {"level": "L1", "tensor_list": ["linear"], "summary_mode": "md5"},
    "L0, a class": {"level": "L0", "tensor_list": ["Linear"]},
    "L0, a part of a name": {"level": "L0", "tensor_list": ["layers.1"]},
    "L0, a full name": {"level": "L0", "tensor_list": [f"{FULL}.forward.0"]},
    "L0, a full name of a backward": {"level": "L0", "tensor_list": [f"{FULL}.backward.0"]},
    "L0, the end of a name": {"level": "L0", "tensor_list": ["fc.Linear.forward"]},
    "mix, an op": {"level": "mix", "tensor_list": ["layer_norm"]},
    "mix, a class": {"level": "mix", "tensor_list": ["LayerNorm"]},
    "mix, backward": {"level": "mix", "tensor_list": ["backward"]},
    "mix, a class within a list": {"level": "mix", "list": ["layers.1"], "tensor_list": ["Linear"]},
    "L1, what is not there": {"level": "L1", "tensor_list": ["nothing"]},
}
LISTED: dict[str, dict[str, Any]] = {
    "L1, list of an op": {"level": "L1", "list": ["linear"]},
    "L1, list of an op, beside md5": {"level": "L1", "list": ["linear"], "summary_mode": "md5"},
    "L0, list of a part of a name": {"level": "L0", "list": ["fc"]},
    "mix, list of an op": {"level": "mix", "list": ["layer_norm"]},
    "mix, list of a part of a module's name": {"level": "mix", "list": ["layers.1"]},
}
OURS_ALONE = {
    "Module.root.Net.forward.0": "the model itself",
    "Module.root.Net.backward.0": "the model itself",
    "Module.layers.1.Block.backward.0": "begins in the stretch and ends behind it",
}
# calls that the program does not make: hooks of those releases, and what `backward` begins with
OWN = re.compile(r"Tensor\.view_as\.\d+\.forward|Torch\.ones_like\.0\.forward")
Recorded = dict[str, Any]  # name of a call → its entry
Tensors = tuple[int, dict[str, bool]]  # how many files, and of each call whether it has statistics and, beside md5, a checksum
ENDS = "a scope of 1.3.0 and 8.1.1 leaves out the last module at L0, and goes on to its end at mix"
OLDER_DIFFER = {"L0, scope of two modules": ENDS, "mix, scope of two modules": ENDS}


def entries(python: str, who: str, folder: Path) -> tuple[list[Recorded], list[list[str]], list[Tensors]]:
    """Return what step 0 holds for each configuration.

    The calls; for those of `SAVED`, the names of those with values; for those of `LISTED` the tensors.
    """
    wanted = [
        *({"task": "statistics", **config} for config in CONFIGURATIONS.values()),
        *(sectioned("statistics", config) for config in SAVED.values()),
        *(sectioned("tensor", config) for config in LISTED.values()),
    ]
    texts = [json.dumps({**config, "step": [0]}) for config in wanted]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests/interop/train_small.py")
    done = subprocess.run(
        [python, script, who, str(folder), *texts], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    dumps = [next((folder / str(i)).glob("step0/*/dump.json")) for i in range(len(texts))]
    data = [json.loads(path.read_text())["data"] for path in dumps]
    selected, saved = len(CONFIGURATIONS), len(CONFIGURATIONS) + len(SAVED)
    listed = [tensors(*found) for found in zip(dumps[saved:], data[saved:], LISTED.values(), strict=True)]
    return data[:selected], [valued(one) for one in data[selected:saved]], listed


def sectioned(task: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose keys but `level` stand in the section of the task."""
    return {"task": task, "level": config["level"], task: {key: value for key, value in config.items() if key != "level"}}


def tensors(dump: Path, data: dict[str, Any], config: dict[str, Any]) -> Tensors:
    """Return how many tensor files there are and, of each call, whether all its tensors have what goes with them.

    That is a file, numbers and, where it was asked for, a checksum.
    """
    keys = {"data_name", "Max", *({"md5"} if "summary_mode" in config else ())}
    whole = {
        as_here(name): all(part.get(key) is not None for part in parts(call) if "torch.Tensor" in part.values() for key in keys)
        for name, call in data.items()
        if not OWN.fullmatch(name)
    }
    return len(list((dump.parent / "dump_tensor_data").iterdir())), whole


def valued(data: dict[str, Any]) -> list[str]:
    """Return the calls of which a tensor was saved."""
    return [name for name, call in data.items() if any(part.get("data_name") not in (None, "-1") for part in parts(call))]


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every dict inside of a call's entry."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(inner)


def sides(entry: dict[str, Any]) -> tuple[int, int]:
    """Return how many tensors a call was given, and how many it returned."""
    held = {key: sum("dtype" in part and "shape" in part for part in parts(value)) for key, value in entry.items()}
    return sum(held.get(key, 0) for key in ("input_args", "input_kwargs", "input")), held.get("output", 0)


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
            # of a module within which a scope begins 26.2.0 leaves out what it was given
            for call, entry in recorded[i].items() if "scope" not in name else ():
                assert as_here(call) not in there or sides(entry) == sides(here[as_here(call)]), (name, release, call)
            alone = [entry for entry in here if entry not in there]
            assert set(alone) <= OURS_ALONE.keys(), (name, release)
            why += [OURS_ALONE[entry] for entry in alone]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {len(here)} | {', '.join(dict.fromkeys(why))} |")
    return "\n".join(rows)


def saved_table(theirs: dict[str, list[list[str]]], ours: list[list[str]]) -> str:
    """Return the table of tensor_list. theirs: by release. Calls whose values that tool saves must have them here."""
    rows = [f"| tensor_list | {' | '.join(theirs)} | here |", "|---" * (len(theirs) + 2) + "|"]
    for i, (name, here) in enumerate(zip(SAVED, ours, strict=True)):
        for release, recorded in theirs.items():
            assert {as_here(call) for call in recorded[i]} - set(here) == set(), (name, release)
        counts = [len(recorded[i]) for recorded in theirs.values()]
        assert (len(here) == 0) == (counts[-1] == 0), name
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {len(here)} |")
    return "\n".join(rows)


def listed_table(theirs: dict[str, list[Tensors]], ours: list[Tensors]) -> str:
    """Return the table of tensors beside a list. theirs: by release. The same calls have the same of their tensors here."""
    rows = [f"| task tensor | {' | '.join(theirs)} | here |", "|---" * (len(theirs) + 2) + "|"]
    for i, (name, (count, whole)) in enumerate(zip(LISTED, ours, strict=True)):
        for release, recorded in theirs.items():
            assert {call: whole.get(call) for call in recorded[i][1]} == recorded[i][1], (name, release)
        assert all(whole.values()), name
        rows.append(f"| {name} | {' | '.join(str(recorded[i][0]) for recorded in theirs.values())} | {count} |")
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
    ours = recorded.pop("ours")
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    tables: tuple[Callable[[Any, Any], str], ...] = (table, saved_table, listed_table)
    for which, made in enumerate(tables):
        measured = made({name: calls[which] for name, calls in recorded.items()}, ours[which])
        assert measured in page or pytest.fail(f"docs/migration.md does not show what was measured:\n{measured}")
