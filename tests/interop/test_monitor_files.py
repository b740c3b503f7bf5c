"""The files of the monitor, written by both tools in the same training: the same names, columns, rows and numbers.

The table in docs/migration.md is what this measures.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.interop.peer import PEER, needs_peer

pytestmark = needs_peer
ROOT = Path(__file__).resolve().parents[2]
ALL = ["norm", "min", "max", "mean", "nans", "zeros"]
EVERYTHING = {"wg_distribution": True, "param_distribution": True, "mv_distribution": True, "xy_distribution": True}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "everything, all modules": {"targets": {}, "ops": ALL, **EVERYTHING, "all_xy": True, "ndigits": 12},
    "one module and one parameter": {
        "targets": {"layers.1": {"input": "tuple[1]:0", "output": "tensor"}, "head.weight": {}},
        "ops": ["max", "norm"],
        **EVERYTHING,
        "ndigits": 12,
    },
    "one step, from 1 on": {
        **{"targets": {}, "wg_distribution": True, "start_step": 1, "step_interval": 2, "collect_times": 1, "ndigits": 12},
    },
    "forward only, two steps a file": {
        **{
            "xy_distribution": True,
            "forward_only": True,
            "targets": {"0:embed": {}},
            "step_count_per_record": 2,
            "ndigits": 12,
        },
    },
    "gradients of each micro-batch": {"targets": {}, "wg_distribution": True, "monitor_mbs_grad": True, "ndigits": 12},
    "alerts": {
        "targets": {},
        "param_distribution": True,
        "ndigits": 12,
        "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan"}]},
    },
    "a NaN, with `dump`": {
        "targets": {},
        "wg_distribution": True,
        "ndigits": 12,
        "nan_at": 2,
        "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
    },
    "two ranks": {
        **{"targets": {"layers.1": {}}, "ops": ["max", "norm"], **EVERYTHING, "ndigits": 12, "ranks": 2},
    },
    "two ranks, modules of the second": {
        "targets": {},
        "wg_distribution": True,
        "module_ranks": [1],
        "ndigits": 12,
        "ranks": 2,
    },
    "second monitor on two ranks": {
        "framework": "pytorch",
        "monitors": {"weight_grad": {"enabled": True}, "param": {"enabled": True}},
        "ranks": 2,
    },
    "second monitor": {
        "framework": "pytorch",
        "monitors": {kind: {"enabled": True} for kind in ("module", "weight_grad", "optimizer", "param")},
    },
}
# what only trainprobe writes: files, and rows of a file
MORE_FILES = {
    "exp_avg_after": "exp_avg after the step",
    "exp_avg_sq_after": "exp_avg_sq after the step",
    "step": "the optimizer's step counter",
    "step_after": "the optimizer's step counter",
    "grad_unclipped": "gradients before they were clipped",
    "grad_unreduced": "gradients of this rank alone, which that tool leaves out where Megatron can be imported",
}
Row = tuple[str, ...]
Table = dict[tuple[Row, int], dict[str, str]]


def files(python: str, who: str, folder: Path) -> tuple[list[dict[str, Path]], list[str]]:
    """Return the CSV files of each configuration by their names, and what the training came to."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    texts = [json.dumps(config) for config in CONFIGURATIONS.values()]
    command = [python, str(ROOT / "tests/interop/monitor_small.py"), who, str(folder), *texts]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = [{_name(path): path for path in (folder / str(i)).glob("*rank*/*.csv")} for i in range(len(texts))]
    return found, sorted(line for line in done.stdout.splitlines() if line.startswith("["))


def _name(path: Path) -> str:
    """Return the name of a file, with its rank where it is not the first."""
    rank = re.search(r"rank_?(\d+)", path.parent.name)
    return path.name if rank is None or rank[1] == "0" else f"rank{rank[1]}/{path.name}"


def read(path: Path) -> tuple[list[str], Table]:
    """Return the columns, and the rows by what they are about; rows about the same are numbered."""
    with path.open(newline="") as lines:
        reader = csv.DictReader(lines)
        rows = list(reader)
    seen: Counter[Row] = Counter()
    table: Table = {}
    for row in rows:
        key = tuple(row.get(name) or "" for name in ("vpp_stage", "step", "name", "module_name", "scope", "micro_step"))
        if any(text not in ("", "nan") for name, text in row.items() if name in ("norm", "max")):
            table[key, seen[key]] = row
        seen[key] += 1
    return list(reader.fieldnames or ()), table


def numbers_that_differ(there: Table, here: Table) -> Counter[str]:
    """Count, by column, the numbers of rows on both sides that differ by more than rounding to 12 places and float32 sums."""
    counts: Counter[str] = Counter()
    for key in there.keys() & here.keys():
        for column in there[key].keys() & here[key].keys():
            a, b = there[key][column], here[key][column]
            try:
                same = math.isclose(float(a), float(b), rel_tol=2e-6, abs_tol=2e-7)
            except ValueError:
                same = a == b
            counts[column] += not same
    return +counts


def sorted_there(folder: Path) -> int:
    """Have that tool's own program sort the anomalies in a folder; return the step of the first one."""
    command = [str(PEER), "-m", "msprobe.core.monitor.anomaly_processor", "-d", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    first = next(iter(json.loads((folder / "anomaly_analyse.json").read_text()).values()))
    assert "AnomalyNan" in first["message"] and first["tag_name"].rpartition("/")[2] in ("post_grad", "actv"), first
    return first["step"]


def test_the_files_of_the_monitor_have_the_names_columns_and_numbers_of_the_other_tool(tmp_path: Path) -> None:
    theirs, their_sums = files(str(PEER), "msprobe", tmp_path / "theirs")
    ours, our_sums = files(sys.executable, "trainprobe", tmp_path / "ours")
    assert their_sums == our_sums
    rows = ["| configuration | files | rows | other numbers here |", "|---|---|---|---|"]
    for name, there, here in zip(CONFIGURATIONS, theirs, ours, strict=True):
        assert there.keys() <= here.keys(), name
        assert {file.rpartition("/")[2].rpartition("_")[0] for file in here.keys() - there.keys()} <= MORE_FILES.keys(), name
        total, columns = 0, Counter[str]()
        for file, path in there.items():
            (their_columns, their_rows), (our_columns, our_rows) = read(path), read(here[file])
            assert their_columns == our_columns, (name, file)
            assert their_rows.keys() <= our_rows.keys(), (name, file)
            found = numbers_that_differ(their_rows, our_rows)
            total, columns = total + len(their_rows), columns + found
        assert total, name
        words = ", ".join(f"{count} of {column}" for column, count in sorted(columns.items()))
        rows.append(f"| {name} | {len(there)} | {total} | {words} |")
    place = list(CONFIGURATIONS).index("a NaN, with `dump`")
    their_step, our_step = (sorted_there(tmp_path / side / str(place) / "anomaly_detected") for side in ("theirs", "ours"))
    assert our_step == their_step == 2
    table = "\n".join(rows)
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    assert table in page or pytest.fail(f"docs/migration.md does not show what was measured:\n{table}")
