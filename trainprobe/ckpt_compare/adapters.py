"""PEFT's adapters beside their names: which method they are of, and matrices that are drawn and need not be stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainprobe.ckpt_compare.pieces import Checkpoint
from trainprobe.engine.model_names import ADAPTER_PART

_WRITTEN = {
    "lora": "LoRA", "randlora": "RandLoRA", "vera": "VeRA", "pvera": "PVeRA", "hada": "LoHa", "lokr": "LoKr", "ia3": "IA3",
    "oft": "OFT", "boft": "BOFT", "fourierft": "FourierFT", "vblora": "VB-LoRA",
}  # fmt: skip
_PROJECTION = re.compile(r"(?:.*\.)?(?:randlora|p?vera)_[AB](?: \([^()]+\))?")
DRAWN_FROM = ("peft_type", "projection_prng_key", "r", "sparse", "very_sparse")  # of adapter_config.json


def method_of(checkpoint: Checkpoint) -> str:
    """Return how the parameters of an adapter begin, `lora`, if the checkpoint holds nothing but one; else nothing."""
    found = [ADAPTER_PART.search(t.name) for t in checkpoint.tensors.values()]
    return next((m["method"] for m in found if m and m["method"]), "") if all(found) else ""


def written(method: str) -> str:
    """Return a method as its authors write it."""
    return _WRITTEN.get(method, method)


def drawn_from(adapter_config: Mapping[str, Any]) -> str:
    """Say from what the matrices of RandLoRA and VeRA are drawn when an adapter is loaded; nothing for other methods."""
    if adapter_config.get("projection_prng_key") is None:
        return ""
    return ", ".join(f"{key} {adapter_config[key]}" for key in DRAWN_FROM if key in adapter_config)


def is_projection(key: str) -> bool:
    """Whether this is a matrix that PEFT draws, and stores only if it is asked to."""
    return _PROJECTION.fullmatch(key) is not None


def drawn_alike(configs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether the configurations of both sides draw these matrices from the same."""
    return bool(configs[0].get("drawn_from")) and configs[0].get("drawn_from") == configs[1].get("drawn_from")
