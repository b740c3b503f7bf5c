"""Mixtures of experts and pipelines on two and on four ranks, trained once for all tests of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.integrations.records import recorded

DRAWN = "zero1-fp32-drawn"
STAGES = ("zero0-fp32", "zero1-fp32")
MOE = {2: ("zero0-fp32", "zero2-fp32", "zero1-bf16", DRAWN), 4: ("zero0-fp32", "zero1-fp32", "zero2-bf16")}
PIPES = {2: ("pipe-zero0-fp32", "pipe-zero1-fp32", "pipe-zero1-bf16"), 4: ("pipe-zero0-fp32", "pipe-zero1-fp32")}
NANS = {2: (*STAGES, "pipe-zero1-fp32"), 4: ()}
DRIFTS = {2: ("pipe-zero1-fp32",), 4: (*STAGES, "pipe-zero1-fp32")}
DUMPS = {2: ("pipe-zero0-fp32-dump",), 4: ()}


def names(ranks: int) -> list[str]:
    """Return what train_parallel.py is to train on so many ranks; pipelines last, as their groups stay in DeepSpeed."""
    faults = [f"{name}@nan" for name in NANS[ranks]] + [f"{name}@drift" for name in DRIFTS[ranks]]
    return sorted([*MOE[ranks], *PIPES[ranks], *DUMPS[ranks], *faults], key=lambda name: name.startswith("pipe"))


@dataclass(frozen=True)
class Trained:
    """What came of them. folder: with a folder for each number of ranks."""

    folder: Path

    def told(self, ranks: int, name: str) -> list[dict]:
        """Return what each rank told of one training."""
        return [json.loads((self.folder / str(ranks) / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]

    def found(self, ranks: int, name: str) -> list[list[list]]:
        """Return what each rank found: rule, step, rank, name."""
        return [[finding[:4] for finding in told["found"]] for told in self.told(ranks, name)]

    def recorded(self, ranks: int, name: str) -> list[dict[int, dict[str, float]]]:
        """Return what each rank recorded, by step."""
        return [recorded(self.folder / str(ranks) / name, rank) for rank in range(ranks)]


def whole(pieces: list[float], key: str, stage: int) -> float:
    """Return the norm of a whole tensor from what ranks hold: each all of it, or pieces where ZeRO cuts."""
    if stage == 0 or key.endswith((" value", " value_after")):
        assert len(set(pieces)) == 1, (key, "replicas differ")
        return pieces[0]
    return sum(piece**2 for piece in pieces) ** 0.5
