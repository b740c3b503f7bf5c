"""Adversaries with a gradient penalty, on a table."""

import numpy as np
import pandas as pd
import torch
from ctgan import CTGAN

torch.manual_seed(0)
np.random.seed(0)
table = pd.DataFrame({"a": np.random.randn(200), "b": np.random.choice(list("xyz"), 200)})
CTGAN(epochs=4, batch_size=50, pac=5, enable_gpu=False, verbose=True).fit(table, ["b"])
