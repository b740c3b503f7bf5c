"""Which ranks a fleet's run log has, where each stands in the job, and which steps it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps.header import read_place
from trainprobe.engine.storage.dumps.layout import find_ranks, find_segments, find_streams, has_run_log
from trainprobe.engine.storage.run_log.replicas import SameAs, reference_segments, same_as, schema_of
from trainprobe.engine.storage.run_log.segments import live_table
from trainprobe.errors import FormatError
from trainprobe.monitor.fleet.duckdb_tables import Duck

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank. same_as: of each compacted segment what it refers to. unreadable: why a file was left out."""

    rank: int
    folder: Path
    segments: tuple[Path, ...]
    live: bool
    same_as: tuple[SameAs, ...] = ()
    unreadable: str | None = None

    @property
    def reference(self) -> int | None:
        """Return the rank that this one's compacted segments refer to, None for a whole log."""
        return self.same_as[0].rank if self.same_as else None


@dataclass(frozen=True, slots=True)
class StepsOfRank:
    """The steps of all ranks, one entry a rank and step, in the order of ranks and steps. time: microseconds since 1970."""

    rank: I64
    step: I64
    time: I64


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a fleet's folder holds. places: rank → where it stands. steps: which steps each has. written: how many each wrote,
    those that were repeated too.
    """

    folder: Path
    files: Mapping[int, RankFiles]
    places: Mapping[int, Place]
    steps: StepsOfRank
    repeated: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    written: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def live(self) -> bool:
        """Whether any rank's log was left open: it is being written, or was killed."""
        return any(files.live for files in self.files.values())


def find_files(folder: Path) -> dict[int, Path]:
    """Return rank → folder of the ranks whose run log is in columns. Raises FormatError where there is none."""
    if not folder.is_dir():
        raise FormatError(f"{folder} is no folder: name the folder that the run wrote to (`output` of its plan)")
    ranks = find_ranks(folder)
    found = {rank: path for rank, path in ranks.items() if has_run_log(path)}
    if not found:
        seen = f"the folders of {len(ranks)} ranks there hold none" if ranks else "there are no folders rank{R} in it"
        raise FormatError(
            f"{folder} holds no run log in columns (rank{{R}}/metrics-*.parquet): {seen}. --fleet reads no other format; "
            "`trainprobe judge` without --fleet reads dumps and records.jsonl"
        )
    return found


def files_of(rank: int, folder: Path) -> RankFiles:
    """Return the files of a rank; those that cannot be read are left out and named."""
    segments, refers, wrong = list[Path](), list[SameAs](), None
    for segment in find_segments(folder):
        try:
            to = same_as(schema_of(segment))
            if to is not None:
                reference_segments(segment, to)
                refers.append(to)
            segments.append(segment)
        except FormatError as error:
            wrong = str(error)
        except (pa.ArrowInvalid, OSError) as error:
            wrong = f"{segment} cannot be read: {' '.join(str(error).split())}"
    return RankFiles(rank, folder, tuple(segments), bool(find_streams(folder)), tuple(refers), wrong)


def take_stock(ranks: Sequence[tuple[int, Path]]) -> tuple[list[RankFiles], pa.Table]:
    """Return the files of some ranks and their rows of kind `step`: rank, step, time, detail (the first one's alone)."""
    files = [files_of(rank, folder) for rank, folder in ranks]
    duck = Duck()
    live = [table for one in files if one.live and (table := live_table(one.folder)) is not None]
    source = duck.source("stock", [segment for one in files for segment in one.segments], live)
    if source is None:
        return files, _NO_STEPS
    found = duck.table(
        "select rank, step, epoch_us(time) as time, case when row_number() over (partition by rank order by time) = 1 "
        f"then detail end as detail from {source} where kind = 'step' order by rank, step, time"
    )
    return files, found


_NO_STEPS = pa.table(
    {
        "rank": pa.array([], pa.int32()),
        "step": pa.array([], pa.int64()),
        "time": pa.array([], pa.int64()),
        "detail": pa.array([], pa.string()),
    }
)


def catalog_of(folder: Path, stock: Sequence[tuple[list[RankFiles], pa.Table]]) -> Catalog:
    """Join what `take_stock` returned of all ranks. Raises FormatError where no rank holds a step."""
    table = pa.concat_tables([found for _, found in stock])
    if not table.num_rows:
        raise FormatError(f"{folder} holds no step that could be judged: the run wrote none before it ended, or not to here")
    rank, step, time = (table[name].cast(pa.int64()).to_numpy() for name in ("rank", "step", "time"))
    order = np.lexsort([time, step, rank])
    rank, step, time = rank[order], step[order], time[order]
    again = np.append((rank[1:] == rank[:-1]) & (step[1:] == step[:-1]), False)  # the last writing of a step counts
    repeated: dict[int, set[int]] = {}
    for r, s in zip(rank[again].tolist(), step[again].tolist(), strict=True):
        repeated.setdefault(r, set()).add(s)
    first = table.filter(table["detail"].is_valid())
    places = {r: _place(text, r) for r, text in zip(first["rank"].to_pylist(), first["detail"].to_pylist(), strict=True)}
    files = {one.rank: one for found, _ in stock for one in found}
    whole = {r: frozenset(steps) for r, steps in repeated.items()}
    written = dict(zip(*(each.tolist() for each in np.unique(rank, return_counts=True)), strict=True))
    return Catalog(folder, files, places, StepsOfRank(rank[~again], step[~again], time[~again]), whole, written)


def _place(detail: str, rank: int) -> Place:
    about: dict[str, Any] = orjson.loads(detail)
    try:
        return read_place(about["place"])
    except (KeyError, TypeError, ValueError, IndexError):
        return Place(rank)
