"""Lightning under the probe: one callback more than without.

    python examples/lightning_fit.py

Trains a small network with accumulation and clipping, breaks one weight on the way, and prints what the probe found.
Everything that it saw is in probe_out/lightning; `trainprobe report probe_out/lightning` makes a page of it.
"""

import lightning.pytorch as pl
import torch
from torch import nn

from trainprobe.integrations.lightning import ProbeCallback


class Small(pl.LightningModule):
    """A regression on noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        """Return the loss of one micro-batch."""
        if index == 12:  # the planted fault
            with torch.no_grad():
                self.net[2].weight[0, 0] = float("nan")
        loss = (self.net(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
data = torch.utils.data.DataLoader([torch.randn(32, 16) for _ in range(16)], batch_size=None)
probe = ProbeCallback(output="probe_out/lightning", on_existing="replace")
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[probe],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Small(), data)

for finding in probe.findings:
    print(f"step {finding.step}: {finding.severity} {finding.rule}: {finding.message}")
