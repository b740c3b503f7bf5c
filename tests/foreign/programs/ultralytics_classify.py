"""Warm-up of rate and momentum, accumulation to a nominal batch of 64, an averaged model."""

import os

from ultralytics import YOLO

YOLO("yolov8n-cls.yaml").train(
    data=os.environ["DATA"] + "/cls",
    epochs=3,
    imgsz=32,
    batch=4,
    device="cpu",
    workers=0,
    project=os.environ["OUT"],
    plots=False,
    amp=False,
    seed=0,
)
