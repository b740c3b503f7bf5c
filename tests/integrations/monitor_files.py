"""What TrainerMon is asked for, and what it must have written, in each framework."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

CONFIG = {
    "targets": {},
    "ops": ["norm", "nans"],
    **dict.fromkeys(("wg_distribution", "param_distribution", "mv_distribution"), True),
    **{"xy_distribution": True, "all_xy": True},
}
SORTS = ("actv", "actv_grad", "grad_reduced", "param_origin", "param_updated")


def assert_written(folder: Path, steps: list[int], parameter: str) -> None:
    """Assert that each step has its files, and that a parameter moves from step to step as they say."""
    (own,) = (folder / "out").glob("*-rank0-*")
    tables = {path.stem: list(csv.DictReader(path.read_text().splitlines())) for path in own.glob("*.csv")}
    missing = [f"{sort}_{n}-{n}" for n in steps for sort in SORTS if not tables.get(f"{sort}_{n}-{n}")]
    assert missing == []
    assert f"exp_avg_{steps[-1]}-{steps[-1]}" in tables
    norms = {}
    for sort in ("param_origin", "param_updated", "grad_reduced"):
        for n in steps:
            (row,) = [row for row in tables[f"{sort}_{n}-{n}"] if row["name"] == parameter]
            assert (row["step"], float(row["nans"])) == (str(n), 0)
            norms[sort, n] = float(row["norm"])
    assert norms["param_updated", steps[0]] == norms["param_origin", steps[1]] != norms["param_origin", steps[0]]
    assert all(math.isfinite(norms["grad_reduced", n]) and norms["grad_reduced", n] > 0 for n in steps)


def write_config(folder: Path) -> None:
    """Write monitor.json."""
    (folder / "monitor.json").write_text(json.dumps(CONFIG))
