"""Runs every planted difference and every harmless pair, and judges the first line: `python -m benchmarks.config_bench`.

Each run is a training in a process of its own, and each comparison the real command. `--fork` begins trainings in copies of one
process that has imported torch, which saves two thirds of the time. `--set threads` takes the differences that people reported
in public threads. `--only TEXT` (may be given again) takes the case of that name, or those whose name or group holds the text;
`--keep FOLDER` keeps the packs, `--again` only compares packs that were kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.config_bench import runner
from benchmarks.config_bench.case import Case
from benchmarks.config_bench.harmless import HARMLESS
from benchmarks.config_bench.planted import PLANTED
from benchmarks.config_bench.runner import compare, judge, run_pair
from benchmarks.config_bench.threads import THREADS, THREADS_HARMLESS

SETS = {"planted": (*PLANTED, *HARMLESS), "threads": (*THREADS, *THREADS_HARMLESS)}


def prepare_to_fork() -> None:
    """Import what every training imports, and set what each of them is started with."""
    import numpy  # noqa: F401
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1", "TRAINPROBE_ON_ERROR": "raise"}
    torch.set_num_threads(1)
    runner.FORK = True


def chosen_of(cases: Sequence[Case], texts: Sequence[str]) -> list[Case]:
    """Return the cases that a text names or, where none has that name, whose name or group holds it; without texts all."""
    names = {c.name for c in cases}
    return [c for c in cases if not texts or any(t == c.name if t in names else t in f"{c.group} {c.name}" for t in texts)]


def main() -> None:
    """Run the cases and print one line each, then the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, default="planted")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.fork:
        prepare_to_fork()
    chosen = chosen_of(SETS[args.set], args.only)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="config_bench_"))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "pairs.json"
    pairs: dict[str, list[str]] = json.loads(kept.read_text()) if args.again else {}
    bases: dict[str, Path] = {}
    results: list[dict[str, str]] = []
    for case in chosen:
        if case.name not in pairs:
            pairs[case.name] = [str(p) for p in run_pair(case, folder, bases)]
            kept.write_text(json.dumps(pairs))
        code, line, _ = compare(*map(Path, pairs[case.name]))
        results.append({"case": case.name, "group": case.group, "verdict": judge(case, code, line), "first line": line})
        print(f"{results[-1]['verdict']:7} {case.group}: {case.name}: {line}", flush=True)
    planted = [r for r in results if r["group"] != "harmless"]
    counts = {v: sum(r["verdict"] == v for r in results) for v in ("named", "beside", "told", "missed", "quiet", "alarm")}
    print(json.dumps({"planted": len(planted), **counts}))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if not args.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
