"""Manual optimization: Lightning's demo model steps its optimizer itself."""

import lightning
from lightning.pytorch.demos.boring_classes import BoringDataModule, ManualOptimBoringModel

lightning.seed_everything(0)
trainer = lightning.Trainer(
    max_epochs=2, limit_train_batches=10, accelerator="cpu", enable_progress_bar=False, logger=False, enable_checkpointing=False
)
trainer.fit(ManualOptimBoringModel(), BoringDataModule())
