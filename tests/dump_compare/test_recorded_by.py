"""Dumps of mindstudio-probe 26.2.0 and 8.1.1 and of this tool, on either side and on both: one training, recorded thrice."""

from __future__ import annotations

import json
import re
import sys
from itertools import permutations
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.interop.peer import OLDER, PEER, needs_older
from tests.matrices import matrix
from trainprobe.cli import main

SCRIPT = Path(__file__).with_name("train_recorded_by.py")
WHO = ("8.1.1", "26.2.0", "ours")
TASKS = {"statistics": {"task": "statistics", "level": "mix"}, "tensor": {"task": "tensor", "level": "mix"}}
PLANTED = {
    "weight": r"Module\.layers\.1\.fc\.Linear\.forward\.0|Functional\.linear\.1\.forward",
    "backward": r"parameters_grad",
}
PAIRS = [*permutations(WHO, 2), *((who, who) for who in WHO)]
pytestmark = needs_older


def record(folder: Path, who: str, task: str, *planted: str) -> Path:
    """Return the first step of a training that one of the tools recorded."""
    python = {**OLDER, "26.2.0": str(PEER), "ours": sys.executable}[who]
    settings = {**TASKS[task], **({"phases": ["forward", "backward"]} if who == "ours" else {})}
    made = folder / who / task / "".join(planted)
    made.parent.mkdir(parents=True, exist_ok=True)
    by = "trainprobe" if who == "ours" else "msprobe"
    launch(SCRIPT, 1, by, str(made), json.dumps(settings), *planted, python=python)
    return made / "step0"


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[tuple[str, ...], Path]:
    folder = tmp_path_factory.mktemp("recorded")
    found: dict[tuple[str, ...], Path] = {}
    for who in WHO:
        found |= {(who, task): record(folder, who, task) for task in TASKS}
        found |= {(who, planted): record(folder, who, "statistics", planted) for planted in PLANTED}
    return found


@pytest.mark.parametrize(("pair", "task"), matrix(PAIRS, TASKS))
def test_one_training_is_the_same_whoever_recorded_it(steps, tmp_path, capsys, pair, task):
    a, b = pair
    result = tmp_path / "all.json"
    code = main(["dump-compare", str(steps[a, task]), str(steps[b, task]), "--json", str(result)])
    said = capsys.readouterr().out
    calls = json.loads(result.read_text())["calls"]
    assert {call["verdict"] for call in calls} <= {"identical", "rounding", "carried", "missing"}, said
    assert sum(call["verdict"] != "missing" for call in calls) > 30, said
    if a == b:
        assert code == 0, said
    else:  # each tool records some operators that another leaves out
        assert code in (0, 1, 3), said
        missing = {call["a"] or call["b"] for call in calls if call["verdict"] == "missing"}
        assert not [name for name in missing if re.search("Module|linear|norm|gelu|entropy|embedding", name)], missing


@pytest.mark.parametrize(("pair", "planted"), matrix(PAIRS, PLANTED))
def test_what_is_planted_is_named_whoever_recorded_it(steps, capsys, pair, planted):
    a, b = pair
    code = main(["dump-compare", str(steps[a, "statistics"]), str(steps[b, planted])])
    said = capsys.readouterr().out
    assert code == 2, said
    assert re.search(PLANTED[planted], said.splitlines()[0]), said
