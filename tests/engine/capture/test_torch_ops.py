"""What the op tap must not miss: writes that leave no trace, and the call that a line of Python was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FUSED = """
import tempfile, torch, trainprobe
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
lists = [[torch.rand(3) + 0.1 for _ in range(2)] for _ in range(4)] + [[], [torch.tensor(1.0) for _ in range(2)]]
with trainprobe.watch(model, output=tempfile.mkdtemp(), level="L1", sinks=["memory"], on_error="raise") as probe:
    probe.begin_step()
    before = [float(torch.stack(tensors).norm()) for tensors in lists[:4]]
    torch._fused_adamw_(*lists, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
    after = [float(torch.stack(tensors).norm()) for tensors in lists[:4]]
    step_data = probe.end_step()
norms = step_data.numbers()["norm"]
stacks = [call for call in step_data.calls if call.name == "Torch.stack"]
assert len(stacks) == 8, [call.name for call in step_data.calls]
for call, expected in zip(stacks, before + after):
    values = call.args[0]
    seen = sum(norms[value.row] ** 2 for value in values) ** 0.5
    assert abs(seen - expected) < 1e-5 * (1 + expected), (call.call, seen, expected)
assert before[0] != after[0] and before[2] != after[2] and before[3] != after[3]
"""


def test_lists_that_a_fused_optimizer_writes_are_looked_at_anew() -> None:
    done = subprocess.run([sys.executable, "-c", FUSED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
