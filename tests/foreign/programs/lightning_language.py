"""Two of Lightning's demo models, a transformer and an LSTM, one after the other with accumulation."""

import os
from pathlib import Path

import lightning
from lightning.pytorch.demos import LightningLSTM, LightningTransformer, WikiText2
from torch.utils.data import DataLoader, Subset

lightning.seed_everything(0)
text = WikiText2(Path(os.environ["DATA"]) / "lmdata", download=False)
loader = DataLoader(Subset(text, range(96)), batch_size=4)
for kind in (LightningTransformer, LightningLSTM):
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(kind(vocab_size=text.vocab_size), loader)
