"""Callbacks, a schedule, early stopping, and `optimizer.step(closure)`."""

import numpy as np
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import EarlyStopping, LRScheduler
from skorch.toy import make_classifier

torch.manual_seed(0)
x = np.random.RandomState(0).randn(512, 20).astype("float32")
y = (x[:, 0] > 0).astype("int64")
callbacks = [LRScheduler("StepLR", step_size=2), EarlyStopping()]
NeuralNetClassifier(make_classifier(input_units=20), max_epochs=5, lr=0.1, batch_size=32, callbacks=callbacks).fit(x, y)
