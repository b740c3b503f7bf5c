"""Keeps the last collected steps in memory, for the black box, for tests and for looking at a run from inside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.storage.dumps.tensor_files import SavedTensor

KEPT = 8


class MemorySink:
    """Holds the last `kept` collected steps, their tensors by key, and as many findings as there were, all oldest first."""

    def __init__(self, kept: int = KEPT) -> None:
        self.collected_steps: deque[StepData] = deque(maxlen=kept)
        self.found: list[Finding] = []
        self.tensors: dict[int, dict[str, SavedTensor]] = {}

    def tensor(self, step: int, saved: SavedTensor) -> bool:
        """Keep one value of a step, as long as its step is kept."""
        self.tensors.setdefault(step, {})[saved.key] = saved
        return True

    def write(self, step_data: StepData) -> None:
        """Keep a collected step and let go of the oldest."""
        self.collected_steps.append(step_data)
        kept = {r.step for r in self.collected_steps}
        for step in [step for step in self.tensors if step not in kept]:
            del self.tensors[step]

    def findings(self, findings: Sequence[Finding]) -> None:
        """Keep findings."""
        self.found += findings

    def close(self) -> None:
        """Do nothing: what was kept can still be read."""


def open(folder: Path, plan: object, place: Place) -> MemorySink:
    """Open a memory of the last `KEPT` collected steps."""
    return MemorySink()
