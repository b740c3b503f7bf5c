"""Ranks whose loss, gradient norm or another scalar is far from that of their replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.monitor.fleet.groups import Group

F64 = npt.NDArray[np.float64]
LEAST_RANKS = 4  # of fewer ranks, the outlier cannot be identified
LEAST_STEPS = 3  # in a row: a single batch may be unusual
FAR = 10.0  # deviations from the median, in standard deviations as the median deviation tells them
FLOOR = 1e-3  # of the median, where most ranks report the same number


def deviating_scalars(table: pa.Table, groups: Sequence[Group], places: Mapping[int, Place]) -> list[Finding]:
    """Return findings on scalars that stay far from the median of the replicas, or are the only ones that are not finite.

    table: rank, step, name, value, as in `Examined`.
    """
    found: list[Finding] = []
    ranks, steps = (table[name].cast(pa.int64()).to_numpy() for name in ("rank", "step"))
    names, values = table["name"].combine_chunks().dictionary_encode(), table["value"].to_numpy()
    group_of = {rank: group.number for group in groups for rank in group.ranks}
    number = np.array([group_of[rank] for rank in ranks.tolist()], np.int64)
    codes, words = names.indices.to_numpy(), names.dictionary.to_pylist()
    for group in groups:
        for code, name in enumerate(words):
            rows = np.flatnonzero((number == group.number) & (codes == code))
            if rows.size and len(group.ranks) >= LEAST_RANKS:
                found += _deviating(name, ranks[rows], steps[rows], values[rows], places)
    return found


def _deviating(
    name: str, ranks: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], values: F64, places: Mapping[int, Place]
) -> Iterator[Finding]:
    rank, row = np.unique(ranks, return_inverse=True)
    step, column = np.unique(steps, return_inverse=True)
    grid = np.full((len(rank), len(step)), np.nan)
    there = np.zeros(grid.shape, bool)
    grid[row, column], there[row, column] = values, True
    finite = np.where(np.isfinite(grid), grid, np.nan)
    enough = np.isfinite(finite).sum(axis=0) * 2 > there.sum(axis=0)
    if not enough.any():
        return
    finite[:, ~enough] = 0.0
    middle = np.nanmedian(finite, axis=0)
    spread = 1.4826 * np.nanmedian(np.abs(finite - middle), axis=0) + FLOOR * np.abs(middle) + np.finfo(float).tiny
    far = (np.abs(grid - middle) > FAR * spread) & there & enough
    lost = there & ~np.isfinite(grid) & enough
    for at in np.flatnonzero(far.any(axis=1) | lost.any(axis=1)).tolist():
        begin = _first_run(far[at] | lost[at], lost[at])
        if begin is not None:
            count = int((far[at] | lost[at]).sum())
            yield _finding(name, int(rank[at]), step, begin, count, grid[at, begin], middle[begin], places)


def _first_run(far: npt.NDArray[np.bool_], lost: npt.NDArray[np.bool_]) -> int | None:
    """Return where the first stretch of enough steps begins; one value that is not finite is enough."""
    runs = np.convolve(far, np.ones(LEAST_STEPS), "valid") == LEAST_STEPS if far.size >= LEAST_STEPS else np.zeros(0, bool)
    starts = [*np.flatnonzero(runs)[:1].tolist(), *np.flatnonzero(lost)[:1].tolist()]
    return min(starts, default=None)


def _finding(
    name: str,
    rank: int,
    steps: npt.NDArray[np.int64],
    at: int,
    count: int,
    value: float,
    middle: float,
    places: Mapping[int, Place],
) -> Finding:
    step = int(steps[at])
    return Finding(
        "fleet_scalars",
        "warning",
        f"{name} of rank {rank} is {value:.5g} at step {step}, where the median of its replicas is {middle:.5g}; "
        f"it is far from theirs at {count} steps",
        step,
        places.get(rank),
        Site("scalar", name, "value"),
        measured=float(value),
        expected=float(middle),
        next=f"look at the batches of rank {rank} from step {step} on, and at what its data loader reads",
        count=count,
    )
