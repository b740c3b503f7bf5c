"""A DeepSpeed training under the probe. ZeRO 2 on two ranks; the second one computes a NaN in step 3, and the probe says where.

    deepspeed --no_local_rank examples/deepspeed_zero.py

Without accelerators: DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py
"""

import os

import deepspeed
import torch
from torch import nn

from trainprobe.integrations.deepspeed import attach, probe_of

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled on a machine without accelerators
PLAN = {
    "record": "nothing",
    "output": "probe_out",
    "monitor": {"gradients": {"unreduced": True, "per_micro": True}, "optimizer_state": True, "activations": False},
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "steps_per_print": 10**9,
}


def main() -> None:
    """Train on this rank, and print what was found."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    seen = iter(range(100))
    if os.environ.get("RANK") == "1":  # the mistake
        net[2].weight.register_hook(lambda gradient: gradient / 0.0 * 0.0 if next(seen) == 4 else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG)
    engine = attach(engine, PLAN)
    probe = probe_of(engine)
    device = engine.device
    for _ in range(5 * CONFIG["gradient_accumulation_steps"]):
        x = torch.randn(8, 16, device=device)
        engine.backward(engine(x).square().mean())
        engine.step()
    engine.destroy()
    for finding in probe.findings:
        print(f"rank {probe.place.rank}: {finding.message}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
