"""What a report shows, as plain data: anything that can fill these four dataclasses can have a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Finding, Site
from trainprobe.errors import UsageError

Floats = npt.NDArray[np.floating]
Curve = tuple[Sequence[int] | npt.NDArray[np.int64], Sequence[float] | Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One heatmap: a statistic of one kind of value, for each rank, row and step.

    name: what the values are (`gradients`, `activations out`); metrics of the same name are one entry in the page's
    selector, and `statistic` (`norm`, `max`, …) the other. rows: one name a row, in the order of the model. steps:
    ascending step numbers [S]. values: floats [ranks, rows, S]; NaN and infinities are shown as what they are.
    missing: bool [ranks, rows, S], True where nothing was recorded (None: nothing is missing). ranks: the rank numbers.
    Raises UsageError when the shapes do not fit each other.
    """

    name: str
    rows: Sequence[str]
    steps: npt.NDArray[np.int64]
    values: Floats
    statistic: str = "norm"
    missing: npt.NDArray[np.bool_] | None = None
    ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Hold the shapes to each other, so that a wrong axis order is an error here and not a wrong picture."""
        expected = (len(self.rows), len(self.steps))
        if self.values.ndim != 3 or self.values.shape[1:] != expected:
            raise UsageError(
                f"metric {self.name!r}: values have shape {self.values.shape}, but {len(self.rows)} rows and "
                f"{len(self.steps)} steps need [ranks, {expected[0]}, {expected[1]}]; transpose the array"
            )
        if self.missing is not None and self.missing.shape != self.values.shape:
            raise UsageError(f"metric {self.name!r}: missing has shape {self.missing.shape}, values {self.values.shape}")


class MadeWhenAsked(Sequence[Metric]):
    """Metrics that are made each time they are asked for: those of a long run do not all fit into memory at once."""

    def __init__(self, makers: Sequence[Callable[[], Metric]]) -> None:
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, i: Any) -> Any:
        return MadeWhenAsked(self._makers[i]) if isinstance(i, slice) else self._makers[i]()


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of texts shown at the end of the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """All that the page of one run shows.

    meta: label → text, shown under the title. scalars: name → (steps [S], values [S]), drawn as curves in this order.
    metrics: the heatmaps. findings: in any order; the page shows one entry a cause, causes first. tables: shown last. notes:
    sentences on what was not seen, shown with the findings. recorded: how many steps of all, where some are missing. jump: the
    largest jump of the loss, shown where nothing was found. trace: what else is known of a step, rank and
    site, each with its label.
    """

    title: str
    meta: Mapping[str, str] = field(default_factory=dict[str, str])
    scalars: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    metrics: Sequence[Metric] = ()
    findings: Sequence[Finding] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    recorded: str = ""
    jump: str = ""
    trace: Callable[[int | None, int, Site | None], Sequence[tuple[str, str]]] = lambda *_: ()
