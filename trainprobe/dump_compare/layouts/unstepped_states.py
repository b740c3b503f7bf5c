"""What an optimizer keeps of a parameter before it has stepped it: nothing yet, which stands for zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.dump_compare.dump_side import STATISTICS, Columns, Side, gathered
from trainprobe.engine.core.records import Value


class NoState(Side):
    """A rank whose optimizer makes a state in this step: asked for what it held before, it answers zeros."""

    def __init__(self, rank: Side) -> None:
        self.folder, self.step_data, self.unread = rank.folder, rank.step_data, []

    def numbers(self, value: Value) -> Mapping[str, float]:
        """Return the statistics of zeros."""
        return dict.fromkeys(STATISTICS, 0.0)

    def bits(self, value: Value) -> Mapping[str, int]:
        """Return no fingerprints."""
        return {}

    def columns(self, values: Sequence[Value]) -> Columns:
        """Return the statistics of zeros for each value."""
        return gathered(self, values)

    def norm(self, value: Value) -> float:
        """Return the norm of zeros."""
        return 0.0

    def held(self, value: Value, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
        """Return zeros where elements are stored of what the step makes."""
        return None if value.tensor is None else np.zeros(shape, np.float32)
