"""One rank of trainings with the Hugging Face Trainer under DDP, with and without the probe; leaves what came of them in JSON.

train_pair.py FOLDER RUN…    runs: out, mix (on and off), audit, sick (a NaN on the last rank), stop
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.integrations.transformers.small_trainer import CLIP, bits, train
from trainprobe.integrations.transformers import ProbeCallback

RANK = int(os.environ["RANK"])


RANKS = int(os.environ["WORLD_SIZE"])
PLANS = {
    "out": {"level": "off", "monitor": {"optimizer_state": True}},
    "mix": {"level": "mix", "step": 2},
    "audit": {"level": "off", "sinks": [], "audit": {"every": 1}},
}


def main(folder: Path, runs: list[str]) -> None:
    told: dict[str, object] = {}
    common = {"accumulate": 2, "clip": CLIP, "ranks": RANKS, "drop": 0.0}
    last = RANK == RANKS - 1
    bare = bits(train(folder / "hf", [], **common))
    for name in [name for name in runs if name in PLANS]:
        probe = ProbeCallback(PLANS[name], output=folder / name)
        watched = bits(train(folder / "hf", [probe], **common))
        told[f"{name} different bits"] = [key for key in bare if bare[key] != watched[key]]
        told[f"{name} found"] = [f.message for f in probe.findings]
    if "sick" in runs:
        sick = ProbeCallback(output=folder / "sick")
        train(folder / "hf", [sick], **common, **({"nan_at": 5} if last else {}))
        first = next(f for f in sick.findings if f.rule == "nonfinite")
        told["first not finite"] = [first.step, first.place.rank, first.site.name]
    if "stop" in runs:
        plan = {"level": "off", "monitor": {"rules": {"nonfinite": {"actions": ["stop"]}}, "gradients": False}}
        stopping = ProbeCallback(plan, output=folder / "stop")
        told["stopped at"] = train(folder / "hf", [stopping], **common, **({"nan_at": 3} if last else {})).state.global_step
    (folder / f"rank{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
