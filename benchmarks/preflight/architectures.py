"""What a preflight says of models of other people that nobody planted a fault in, as a table of markdown.

python -m benchmarks.preflight.architectures            # of transformers, and of timm and torchvision where installed

healthy: nothing is broken. by design: a property does not hold, and is told to be meant so. finding: a property is BROKEN.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import trainprobe
from benchmarks.preflight.case import Trial
from benchmarks.preflight.foreign import row
from benchmarks.preflight.healthy import HEALTHY
from benchmarks.preflight.programs import pictures

TIMM = ("vit_tiny_patch16_224", "resnet18", "convnext_atto", "efficientnet_b0", "mixer_s16_224", "deit_tiny_patch16_224",
        "mobilenetv3_small_100", "regnetx_002", "densenet121", "levit_128s")  # fmt: skip
TORCHVISION = ("resnet18", "vgg11_bn", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5")


def _classified(make: Callable[[], nn.Module]) -> Trial:
    torch.manual_seed(0)
    batch = pictures()
    size = torch.nn.functional.interpolate(batch["pixel_values"], 224)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    return Trial(loss, make().train(), {**batch, "pixel_values": size})


def _declared() -> Any:
    """Declare what torchvision's Python files expect of its compiled part, which the registry's wheel has for CUDA alone."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def models() -> dict[str, Callable[[], Trial]]:
    """Return name → what a preflight is given, of all that is installed."""
    found = {f"transformers: {name}": make for name, make in HEALTHY.items() if " " in name and name.split()[1] != "pairs"}
    if importlib.util.find_spec("timm") is not None:
        import timm

        found |= {f"timm: {n}": partial(_classified, partial(timm.create_model, n, num_classes=10)) for n in TIMM}
    if importlib.util.find_spec("torchvision") is not None:
        import torchvision

        names = {n: partial(torchvision.models.get_model, n, num_classes=10) for n in TORCHVISION}
        found |= {f"torchvision: {n}": partial(_classified, make) for n, make in names.items()}
    return found


def of_models() -> Iterator[str]:
    """Yield a row for each model."""
    torch.set_num_threads(1)
    held = _declared() if "+cpu" in torch.__version__ else None
    for name, make in models().items():
        trial = make()
        report = trainprobe.preflight(trial.loss, trial.model, trial.batch, **{"seconds": 600, **trial.options})
        yield row(name, report.as_json()["properties"])
    del held


def main() -> None:
    """Print the table."""
    sys.stdout.write("| model | | what was seen |\n|---|---|---|\n")
    for line in of_models():
        sys.stdout.write(line)
        sys.stdout.flush()


main()
