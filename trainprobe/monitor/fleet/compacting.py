"""`trainprobe runs --compact DIR`: rows that data-parallel replicas share are stored once, in closed segments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson
import typer

from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps.header import read_place
from trainprobe.engine.storage.dumps.layout import find_ranks
from trainprobe.engine.storage.run_log.read import read_tables
from trainprobe.engine.storage.run_log.replicas import compact_segment
from trainprobe.errors import FormatError
from trainprobe.monitor.fleet.catalog import RankFiles, files_of
from trainprobe.monitor.fleet.groups import groups_of

REFERENCES = 4  # ranks of a group whose log stays whole, at most: more would be compared with each further rank


def compact_runs(folder: Path) -> None:
    """Compact every run in a folder and in the folders under it, and print what that saved."""
    parents = sorted({segment.parent.parent for segment in folder.rglob("rank*/metrics-*.parquet")})
    for run in parents:
        before, after = compact_run(run)
        typer.echo(f"{run}: {before / 1e6:.1f} MB of closed segments, now {after / 1e6:.1f} MB")


def compact_run(run: Path) -> tuple[int, int]:
    """Compact the closed segments of one run; return their bytes before and after. Streams that are being written stay."""
    files = {rank: files_of(rank, path) for rank, path in find_ranks(run).items()}
    before = _size(files.values())
    places = {rank: place for rank, one in files.items() if one.segments and (place := _place(one)) is not None}
    held = {one.reference for one in files.values()}
    for group in groups_of(places):
        references = [rank for rank in group.ranks if rank in held][:REFERENCES] or [group.ranks[0]]
        for rank in group.ranks:
            if rank not in references and files[rank].reference is None:
                _compact(files[rank], [files[r] for r in references])
                if len(references) < REFERENCES and files_of(rank, files[rank].folder).reference is None:
                    references.append(rank)
    return before, _size(files_of(rank, path) for rank, path in find_ranks(run).items())


def _compact(one: RankFiles, references: Iterable[RankFiles]) -> None:
    """Compact a rank against the first reference that shares rows with its first segment, and its other segments too."""
    for reference in references:
        if one.segments and compact_segment(one.segments[0], reference.folder):
            for segment in one.segments[1:]:
                compact_segment(segment, reference.folder)
            return


def _place(one: RankFiles) -> Place | None:
    """Return where a rank stands, as its first logged step has it; None for a log that cannot be read."""
    try:
        table = next(read_tables(one.folder, ["detail"], [("kind", "==", "step")]))
        return read_place(orjson.loads(table["detail"][0].as_py())["place"])
    except (FormatError, StopIteration, KeyError, TypeError, ValueError):
        return None


def _size(files: Iterable[RankFiles]) -> int:
    return sum(segment.stat().st_size for one in files for segment in one.segments)
