"""One rank of trainings with the Hugging Face Trainer under DDP, with and without the probe; leaves what came of them in JSON.

train_pair.py FOLDER
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


def main(folder: Path) -> None:
    told: dict[str, object] = {}
    common = {"accumulate": 2, "clip": CLIP, "ranks": 2, "drop": 0.0}
    bare = bits(train(folder / "hf", [], **common))
    for name, plan in (("out", {"level": "off", "monitor": {"optimizer_state": True}}), ("mix", {"level": "mix", "step": 2})):
        watched = bits(train(folder / "hf", [ProbeCallback(plan, output=folder / name)], **common))
        told[f"{name} different bits"] = [key for key in bare if bare[key] != watched[key]]
    sick = ProbeCallback(output=folder / "sick")
    train(folder / "hf", [sick], **common, **({"nan_at": 5} if RANK else {}))
    first = next(f for f in sick.findings if f.rule == "nonfinite")
    told["first not finite"] = [first.step, first.place.rank, first.site.name]
    stopping = {"level": "off", "monitor": {"rules": {"nonfinite": {"actions": ["stop"]}}, "gradients": False}}
    run = train(folder / "hf", [ProbeCallback(stopping, output=folder / "stop")], **common, **({"nan_at": 3} if RANK else {}))
    told["stopped at"] = run.state.global_step
    (folder / f"rank{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
