"""A DeepSpeed training that knows nothing of the probe: ZeRO 1, accumulation, evaluation in between; prints its losses.

loop_script.py [crash]
"""

import sys

import deepspeed
import torch
from deepspeed import initialize
from torch import nn

from tests.distributed.one_rank import settle

ACCUMULATE, STEPS = 2, 4
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
torch.set_num_threads(1)
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": 0.1,
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}
engine, *_ = initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), config=config)
rank = torch.distributed.get_rank()
torch.manual_seed(100 + rank)
for micro in range(STEPS * ACCUMULATE):
    loss = engine(torch.randn(4, 6)).square().mean()
    if "crash" in sys.argv and micro == 5:
        raise RuntimeError("the training broke")
    engine.backward(loss)
    engine.step()
    engine.eval()
    with torch.no_grad():
        engine(torch.randn(4, 6))
    engine.train()
    sys.stdout.write(f"rank {rank} loss {micro} {float(loss):.17g}\n")
sys.stdout.write(f"rank {rank} weights {float(sum(p.double().sum() for p in net.parameters())):.17g}\n")
torch.distributed.destroy_process_group()
settle()
