"""Looks at a fleet in shares: one after the other in this process, or on a Ray cluster whose machines see the same paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa

from trainprobe.engine.core.processes import AnyRun, Given, in_turn
from trainprobe.monitor.fleet.catalog import Catalog, RankFiles, catalog_of, find_files, take_stock
from trainprobe.monitor.fleet.examine import Examined, RankTask, examine
from trainprobe.monitor.fleet.groups import Group, Share, groups_of, regrouped, shares_of, undecided
from trainprobe.monitor.fleet.signatures import Signature, signatures

TOGETHER = 256  # ranks whose steps, or whose signatures, are read together


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was learned of a fleet, before anybody judges it. Rows of the tables are in the order of ranks and steps."""

    catalog: Catalog
    groups: Sequence[Group]
    examined: Sequence[Examined]

    def table(self, name: str) -> pa.Table:
        """Return the rows of all shares: one of the tables of `Examined`."""
        return pa.concat_tables([getattr(one, name) for one in self.examined])


def survey(folder: Path, run: AnyRun = in_turn) -> Survey:
    """Look at all ranks of a fleet. Raises FormatError where there is no run log in columns."""
    ranks = [*find_files(folder).items()]
    catalog = catalog_of(folder, [*run(take_stock, _cut(ranks))])
    groups = _groups(catalog, run)
    tasks = [_task(share, catalog) for share in shares_of(groups)]
    return Survey(catalog, groups, [*run(examine, tasks)])


def _groups(catalog: Catalog, run: AnyRun) -> list[Group]:
    groups = groups_of(catalog.places)
    known = _signatures(catalog, [rank for group in groups if len(group.ranks) > 1 for rank in group.sample], run)
    more = undecided(groups, known, catalog.places)
    return regrouped(groups, {**known, **_signatures(catalog, more, run)})


def _signatures(catalog: Catalog, ranks: Sequence[int], run: AnyRun) -> dict[int, Signature]:
    first = int(catalog.steps.step.min())
    tasks = [(first, _with_references(part, catalog), part) for part in _cut(ranks)]
    return dict(chain.from_iterable(found.items() for found in run(signatures, tasks)))


def _task(share: Share, catalog: Catalog) -> RankTask:
    files = _with_references({*share.ranks, *(rank for group in share.groups for rank in group.sample)}, catalog)
    return RankTask(share, files, tuple((rank, step) for rank in files for step in sorted(catalog.repeated.get(rank, ()))))


def _with_references(ranks: Iterable[int], catalog: Catalog) -> dict[int, RankFiles]:
    needed = {*ranks}
    needed |= {to for rank in needed if (to := catalog.files[rank].reference) is not None}
    return {rank: catalog.files[rank] for rank in sorted(needed)}


def _cut(items: Sequence[Given]) -> list[Sequence[Given]]:
    return [items[i : i + TOGETHER] for i in range(0, len(items), TOGETHER)]
