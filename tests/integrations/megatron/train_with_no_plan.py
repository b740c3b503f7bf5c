"""A tiny Megatron GPT on one CPU under the default plan: `train_with_no_plan.py FOLDER FIRST`; alarms.txt gets what warned.

The rate rises from zero, as Megatron's own scheduler sets it between steps. FIRST is the number of the first step, or "fp16":
half precision from step 0 on, with a loss scale that comes down from 2^32.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
import train as trained  # noqa: E402

from trainprobe.engine.plan.defaults import default_plan  # noqa: E402
from trainprobe.integrations import megatron  # noqa: E402

STEPS = 64
folder, half = Path(sys.argv[1]), sys.argv[2] == "fp16"
first = 0 if half else int(sys.argv[2])
training = trained.Training("alone fp16" if half else "alone")
training.a.steps = STEPS


def warm_up(moment: str, step: int) -> None:
    if moment == "after_opt":
        set_rate(step + 1)


def set_rate(step: int) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-2 * min(1.0, step / 10)


set_rate(0)
plan = {**default_plan(), "output": str(folder / "out")}
with megatron.attach(training.chunks, training.optimizer, plan, first_step=first) as probe:
    training.run(warm_up)
found = [f"{f.step} {f.rule}: {f.message}" for f in probe.findings if f.severity != "info"]
(folder / "alarms.txt").write_text("\n".join(found))
trained.fresh()
