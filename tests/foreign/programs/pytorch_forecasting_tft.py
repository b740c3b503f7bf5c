"""Attention, an LSTM and gates, with the gradient clipped by Lightning."""

import lightning
import numpy as np
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

lightning.seed_everything(0)
table = pd.DataFrame({"t": np.tile(np.arange(60), 4), "g": np.repeat(list("abcd"), 60), "y": np.sin(np.arange(240) / 4)})
rows = TimeSeriesDataSet(
    table, "t", "y", ["g"], max_encoder_length=12, max_prediction_length=4, time_varying_unknown_reals=["y"]
)
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    limit_train_batches=10,
    gradient_clip_val=0.1,
    enable_progress_bar=False,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(TemporalFusionTransformer.from_dataset(rows, hidden_size=8, log_interval=0), rows.to_dataloader(batch_size=16))
