"""A plain PyTorch loop under the probe: three lines more than without.

    python examples/plain_loop.py

Writes probe_out/step{1,3}/rank0/dump.json with the statistics of every module, op and gradient of two steps.
"""

import torch

import trainprobe

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with trainprobe.watch(model, optimizer, record="mix", step=[1, 3], on_existing="replace") as probe:
    for _ in range(5):
        with probe.step():
            x = torch.randn(32, 16)
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.note("loss", loss)

print("recorded:", *sorted(map(str, probe.plan.output.glob("step*/rank*/dump.json"))), sep="\n  ")
for finding in probe.findings:
    print(finding.severity, finding.message)
