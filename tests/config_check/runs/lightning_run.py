"""A Lightning training, once for each change: `lightning_run.py FOLDER CHANGE…`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from trainprobe import ConfigChecker

warnings.filterwarnings("ignore")


def train(out: Path, change: str) -> None:
    ConfigChecker.apply_patches(on_error="raise")
    import lightning.pytorch as pl
    import torch
    from change import BATCH, Net, nudge, rate, samples, seed_all
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net(change)

        def training_step(self, batch, index):
            return self.net(*batch)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=rate(change))
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    seed_all(change)
    module = Module()
    nudge(module, change)
    loader = DataLoader(TensorDataset(*samples(change)), batch_size=BATCH)
    clip = 0.5 if change == "clipping" else 1.0
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with ConfigChecker(module, output_zip_path=out / f"{change.replace(' ', '_')}.zip", on_error="raise"):
        pl.Trainer(max_steps=6, accelerator="cpu", gradient_clip_val=clip, accumulate_grad_batches=2, **options).fit(
            module, loader
        )
    assert "training_step" not in vars(module)


for change in sys.argv[2:]:
    train(Path(sys.argv[1]), change)
