"""Keras on PyTorch: its own loop and its own optimizer classes, validation after each epoch."""

import keras
import numpy as np

keras.utils.set_random_seed(0)
layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
model = keras.Sequential([*layers, keras.layers.Dense(1)])
x = np.random.rand(256, 8)
model.compile("adam", "mse")
model.fit(x, x.sum(1), epochs=8, batch_size=32, validation_split=0.25, verbose=2)
