"""A fit in scikit-learn's style: ghost batch norm, a schedule, an evaluation set and early stopping."""

import numpy as np
import torch
from pytorch_tabnet.tab_model import TabNetClassifier

chance = np.random.RandomState(0)
x = chance.randn(512, 8).astype("float32")
y = (x[:, 0] + x[:, 1] > 0).astype(int)
model = TabNetClassifier(
    seed=0, device_name="cpu", scheduler_params={"step_size": 2, "gamma": 0.9}, scheduler_fn=torch.optim.lr_scheduler.StepLR
)
model.fit(x[:400], y[:400], eval_set=[(x[400:], y[400:])], max_epochs=8, batch_size=64, virtual_batch_size=32)
