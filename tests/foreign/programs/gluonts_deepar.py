"""A recurrent forecaster with a likelihood as its loss, on Lightning."""

import lightning
import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

lightning.seed_everything(0)
start = pd.Period("2020-01-01", freq="D")
rows = ListDataset([{"start": start, "target": np.sin(np.arange(120) / (3 + i)).tolist()} for i in range(4)], freq="D")
DeepAREstimator(
    freq="D",
    prediction_length=7,
    num_layers=1,
    hidden_size=8,
    num_batches_per_epoch=10,
    trainer_kwargs={"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
).train(rows)
