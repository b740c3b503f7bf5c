"""Runs bugs and their twins, in two gloo processes or in one, and brings back what was found on each rank.

two_ranks.py NAMES RESULT_FOLDER PLAN TIMED KEEP        (started by `launch` on each rank)
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bugs.held_out import HELD_OUT
from benchmarks.bugs.open_bench.bug import told
from benchmarks.bugs.published import PUBLISHED, Bug
from benchmarks.bugs.unseen import UNSEEN
from benchmarks.bugs.unseen_again import UNSEEN_AGAIN
from benchmarks.bugs.unseen_fourth import UNSEEN_FOURTH
from benchmarks.bugs.unseen_third import UNSEEN_THIRD
from tests.distributed.launch import launch as in_ranks
from trainprobe.engine.plan.defaults import default_plan
from trainprobe.watching import Probe

ALL = {bug.name: bug for bug in (*PUBLISHED, *HELD_OUT, *UNSEEN, *UNSEEN_AGAIN, *UNSEEN_THIRD, *UNSEEN_FOURTH)}
RANKS = 2
PLAN: dict[str, Any] = {"level": "off", "audit": {"every": 1}, "sinks": []}
DEFAULT_STEPS = 75  # under the default plan, which audits few steps, the loops run for at least so many


def train(kind: type[Any], watched: bool, plan: str = "every-step", keep: Path | None = None) -> dict[str, Any]:
    """Train once on this rank; return the findings and the time that it took.

    plan: "every-step" for the plan of the set itself, "default" for that of an integration that is given none, or
    "default+48" for that, with a bug that begins in mid-run doing so 48 steps later, when several steps were audited.
    keep: where the output stays.
    """
    plan, _, later = plan.partition("+")
    if later and kind.begins > 0 and not hasattr(kind, "restarts"):
        kind = type(kind.__name__, (kind,), {"begins": kind.begins + int(later)})
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    folder = Path(tempfile.mkdtemp(prefix="trainprobe_bugs_"))
    output = folder / "out" if keep is None else keep / kind.__name__
    kept: list[Probe] = []

    def probe_of(model: Any, optimizer: Any, place: Any) -> Any:
        if not watched:
            return None
        existing = "continue" if kept else "replace"
        chosen = default_plan() if plan == "default" else getattr(kind, "plan", PLAN)
        chosen = chosen if keep is None else {**chosen, "sinks": ["parquet"]}
        probe = Probe(chosen, output=str(output), on_existing=existing, place=place)
        kept.append(probe.open(model, optimizer))
        return probe

    if world > 1:
        dist.barrier()
    run = kind(rank, world, probe_of)
    if plan == "default":
        run.steps = max(run.steps, DEFAULT_STEPS) + int(later or 0)
    began = time.process_time()
    run.run()
    spent = time.process_time() - began
    found: list[dict[str, Any]] = []
    for probe in kept:
        probe.close()
        found += [told(f) for f in probe.findings]
    shutil.rmtree(folder, ignore_errors=True)
    return {"findings": found, "seconds": spent, "begins": kind.begins}


def launch(bugs: list[Bug], plan: str = "every-step", timed: bool = False, keep: Path | None = None) -> list[dict[str, Any]]:
    """Run bugs on as many processes as they need; return for each rank {bug: {"bug": …, "twin": …}}.

    plan: see `train`. timed: also train each twin without the probe ("bare"), for the time that the probe takes. keep: folder
    in which what each run writes stays, under the name of its class. Raises RuntimeError when a rank fails.
    """
    alone = [bug for bug in bugs if getattr(bug.run, "ranks", RANKS) == 1]
    together = [bug for bug in bugs if bug not in alone]
    launched = [_launch(group, ranks, plan, timed, keep) for group, ranks in ((alone, 1), (together, RANKS)) if group]
    return [rank for ranks in launched for rank in ranks]


def _launch(bugs: list[Bug], ranks: int, plan: str, timed: bool, keep: Path | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="trainprobe_bugs_") as folder:
        names = json.dumps([bug.name for bug in bugs])
        kept = str(keep or "")
        in_ranks(Path(__file__), ranks, names, folder, plan, "timed" if timed else "", kept, timeout=1500)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    """Run the named bugs on this rank."""
    torch.set_num_threads(1)
    alone = os.environ["WORLD_SIZE"] == "1"
    if not alone:
        dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    plan, keep = sys.argv[3], Path(sys.argv[5]) if sys.argv[5] else None
    twins: dict[type[Any], Any] = {}
    for name in json.loads(sys.argv[1]):
        bug = ALL[name]
        if bug.twin not in twins:
            bare: dict[str, Any] = {}
            if sys.argv[4] == "timed":
                train(bug.twin, False)  # the first run pays for what is loaded late
                bare = {"bare": train(bug.twin, False, plan)}
            twins[bug.twin] = {**bare, "twin": train(bug.twin, True, plan, keep)}
        results[name] = {**twins[bug.twin], "bug": train(bug.run, True, plan, keep)}
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
