"""A DeepSpeed training, once for each change: `deepspeed_run.py FOLDER STAGE CHANGE…`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ.get("WORLD_SIZE", "1")}
sys.path.insert(0, str(Path(__file__).parent))
from trainprobe import ConfigChecker

warnings.filterwarnings("ignore")


def train(out: Path, stage: int, change: str) -> None:
    ConfigChecker.apply_patches(on_error="raise")
    import deepspeed
    import torch
    from change import BATCH, Net, nudge, rate, samples, seed_all

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed_all(change)
    net = Net(change)
    nudge(net, change)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_accumulation_steps": 1 if change == "accumulation" else 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": change == "flag"},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=rate(change)), config=config)
    x, y = samples(change)
    with ConfigChecker(engine, output_zip_path=out / f"{change.replace(' ', '_')}.zip", on_error="raise"):
        for i in range(6):
            here = slice(i * BATCH + rank, (i + 1) * BATCH, world)
            engine.backward(engine(x[here], y[here]))
            engine.step()
    engine.destroy()


for change in sys.argv[3:]:
    train(Path(sys.argv[1]), int(sys.argv[2]), change)
import torch.distributed as dist  # noqa: E402  (not before ConfigChecker watches)

dist.destroy_process_group()
