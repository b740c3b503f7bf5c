"""Two forecasters in a row on Lightning, with validation."""

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NHITS

table = pd.DataFrame({"unique_id": "a", "ds": pd.date_range("2020", periods=200), "y": np.sin(np.arange(200) / 5)})
models = [
    NHITS(h=7, input_size=28, max_steps=20, accelerator="cpu", random_seed=1),
    LSTM(h=7, input_size=28, max_steps=10, accelerator="cpu"),
]
NeuralForecast(models, freq="D").fit(table, val_size=14)
