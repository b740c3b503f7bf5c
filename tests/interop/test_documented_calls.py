"""Programs of the documentation, and each public call, under each release and trainprobe: only the import is changed.

What they leave behind is compared: calls in dumps, CSV files, key data, packs, the random numbers that a seed gives. The
table in docs/migration.md is what this measures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.interop.documented_programs import programs
from tests.interop.peer import OLDER, PEER, needs_older, needs_peer
from tests.interop.test_selections import OWN, as_here

pytestmark = [needs_peer, needs_older]
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    release: next(Path(python).parents[1].glob("lib/python3*/site-packages/msprobe/docs")) for release, python in OLDER.items()
}
MISSING = "—"
# what only one side leaves → why
ONLY_HERE = {
    r"step\d+ Module\.root\..*": "the model itself",
    r"step\d+ Torch\.randn\..*": "an op that makes a tensor",
    r"step0 Torch\.relu\.0\.forward": "functions that were imported before are recorded too",
    r"(grad_unclipped|grad_unreduced|exp_avg|step|actv|param)_.*csv": "more files of the monitor",
    r"grad_reduced_.*csv": "grad_reduced files instead of grad_summary",
}
ONLY_THERE = {
    r"grad_summary_.*csv": "grad_reduced files instead of grad_summary",
    r".*\.npy of signs": "signs of gradients are not written",
}
DROPOUT = "1.3.0 and 8.1.1 take dropout out unless told otherwise, which is printed"
# program → why a release leaves something else behind
DIFFERENT = {
    "seed_all()": DROPOUT,
    "seed_all from msprobe.pytorch.common": DROPOUT,
    "start(token_range=)": "numbered from 0 here and in 26.2.0, from 1 in 8.1.1; the model itself",
    "GradComparator": "record both runs at level L0, then `trainprobe dump-compare`",
    "generate_xy_metrics": "26.2.0 writes files whatever `format` says",
    "PtdbgDispatch": "the import says what replaces it; there it needs prettytable",
    "random_save": "printed: nothing is written",
}
Left = tuple[set[str], str]  # what a program left behind, and the error that ended it


def left(folder: Path, given: dict[str, str], release: str) -> Left:
    """Return what a program left in its folder."""
    found: set[str] = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name in given:
            continue
        if path.name in ("dump.json", "debug.json"):
            step = path.parent.parent.name
            if step == "dump_path":  # 1.3.0 has one debug.json for all steps, and no `.debug` behind the names
                found |= {f"step0 {call}.debug" for call in json.loads(path.read_text())["data"]}
                continue
            calls = (
                as_here(call)
                for call in json.loads(path.read_text())["data"]
                if not OWN.fullmatch(call) or release not in OLDER
            )
            found |= {f"{step} {call}" for call in calls}
        elif re.search(r"rank_?\d+[^/]*/step\d+/.*\.npy$", name):
            found.add(f"{'/'.join(path.parts[-2:])} of signs")
        elif name.startswith(("dump_path/data", "dump_path/configurations")) or path.suffix == ".zip":
            found.add(name)
        elif path.suffix == ".csv" and "rank" in path.parent.name:
            found.add(path.name)
        elif name.startswith("output/") or "tfevents" in name:
            found.add("a table" if name.startswith("output/") else "an event file")
    found |= {line for line in (folder / "out.txt").read_text(errors="replace").splitlines() if line.startswith("drawn ")}
    error = folder / "error.txt"
    return found, error.read_text() if error.exists() else ""


def run(python: str, package: str, folder: Path, files: list[Path]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests/interop/documented_small.py")
    done = subprocess.run(
        [python, script, package, str(folder), *map(str, files)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def reason(entry: str, reasons: dict[str, str]) -> str | None:
    return next((why for pattern, why in reasons.items() if re.fullmatch(pattern, entry)), None)


def row(name: str, theirs: dict[str, Left], ours: Left) -> str:
    """Return one row of the table. What one side alone leaves without a known reason fails."""
    here, error = ours
    why = [DIFFERENT[name]] if name in DIFFERENT else []
    for release, (there, failed) in theirs.items():
        if failed or name in DIFFERENT:
            continue
        if error:
            why.append(error.partition(": ")[2])
            continue
        alone = [(entry, reason(entry, ONLY_HERE)) for entry in sorted(here - there)]
        missing = [(entry, reason(entry, ONLY_THERE)) for entry in sorted(there - here)]
        assert all(known for _, known in alone + missing), (name, release, [e for e, known in alone + missing if not known])
        why += [known for _, known in alone + missing if known]
    counts = [MISSING if failed else str(len(there)) for there, failed in theirs.values()]
    return f"| {name} | {' | '.join(counts)} | {MISSING if error else len(here)} | {', '.join(dict.fromkeys(why))} |"


@pytest.mark.timeout(1800)
def test_documented_programs_leave_the_same_behind_when_only_the_import_is_changed(tmp_path: Path) -> None:
    wanted = programs(FOLDERS)
    files = [tmp_path / f"{i}.json" for i in range(len(wanted))]
    for file, program in zip(files, wanted.values(), strict=True):
        file.write_text(json.dumps(program))
    pythons = {**OLDER, "26.2.0": str(PEER), "here": sys.executable}
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run, python, "trainprobe" if name == "here" else "msprobe", tmp_path / name, files)
            for name, python in pythons.items()
        ]
    for job in jobs:
        job.result()
    rows = ["| program or call | 1.3.0 | 8.1.1 | 26.2.0 | here | why not the same |", "|---|---|---|---|---|---|"]
    for i, (name, given) in enumerate(wanted.items()):
        sides = {who: left(tmp_path / who / str(i), given, who) for who in pythons}
        ours = sides.pop("here")
        rows.append(row(name, sides, ours))
    measured = "\n".join(rows)
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    assert measured in page or pytest.fail(f"docs/migration.md does not show what was measured:\n{measured}")
