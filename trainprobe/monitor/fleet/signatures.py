"""What a rank holds at the first step, as two numbers: its layout, and its parameters. Replicas have the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainprobe.monitor.fleet.catalog import RankFiles
from trainprobe.monitor.fleet.duckdb_tables import Duck
from trainprobe.monitor.fleet.examine import refers_table, source_of

Signature = tuple[int, int]


def signatures(task: tuple[int, Mapping[int, RankFiles], Sequence[int]]) -> dict[int, Signature]:
    """Return rank → (digest of its layout, digest of its parameters) at the fleet's first step.

    task: the step, the files of the ranks and of those that they refer to, and the ranks that are asked for. Ranks that hold no
    parameter at that step are left out.
    """
    step, files, ranks = task
    duck = Duck()
    duck.add("refers", refers_table([*files.values()]))
    duck.run(
        "create table held as select rank, position, hash(name, slot, dtype, shape) as layout, "
        "hash(md5_number_lower(name), slot, coalesce(checksum, hash(min, max, mean, norm, nan, posinf, neginf, zero))) "
        "as value, "
        f"kind = 'parameter' and slot = 'value' as counts from {source_of(duck, 'files', [*files.values()])} "
        f"where step = {step} and position is not null"
    )
    duck.run(
        "insert into held select f.rank, h.position, h.layout, h.value, h.counts from held h join refers f "
        f"on h.rank = f.reference and {step} between f.first and f.last "
        "where not exists (from held o where o.rank = f.rank and o.position = h.position)"
    )
    found = duck.table(
        "select rank, bit_xor(layout) as layout, bit_xor(value) as value from held where counts group by rank order by rank"
    )
    needed = {*ranks}
    rows = zip(*(found[name].to_pylist() for name in ("rank", "layout", "value")), strict=True)
    return {rank: (layout, value) for rank, layout, value in rows if rank in needed}
