"""What one share of a fleet's ranks shows: whose tensors are not those of its replicas, what is not finite, the scalars.

A value is identified by its fingerprint, or by all of its statistics where the run took no fingerprints. Which values replicas
should share is learned from the run: those that most of a sample of the group's ranks hold at the first step at which the value
is more than a constant (zeros are equal on ranks that hold different pieces). Activations, gradients before they are reduced
and pieces of sharded state differ there, and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from trainprobe.engine.storage.run_log.segments import live_table
from trainprobe.monitor.fleet.catalog import RankFiles
from trainprobe.monitor.fleet.duckdb_tables import Duck
from trainprobe.monitor.fleet.groups import Share

COMPARED = "('parameter', 'gradient', 'optimizer')"
_PLACES_BY = (  # DuckDB's hash of strings is quick and meets itself now and then: where it does, the next one is taken
    "hash(name[-8:], name, slot, kind, phase, call, micro)",
    "md5_number_lower(concat_ws(chr(1), kind, name, slot, phase, call, micro))",
)
_NUMBERS = "hash(count, nan, posinf, neginf, zero, min, max, mean, norm)"
_CONSTANT = "(min = max and (count > 1 or min in (0, 1)))"


@dataclass(frozen=True, slots=True)
class RankTask:
    """A share with the files that it needs: those of its ranks, of its groups' samples and of what these refer to.

    repeated: (rank, step) pairs that were logged more than once, which are not compared.
    """

    share: Share
    files: Mapping[int, RankFiles]
    repeated: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Examined:
    """What a share shows. differing: rank, step, values, position, place: of each rank and step with values that are not those
    of its replicas, how many, and the first in the order of execution. bad: the same of values that are not finite. compared:
    grp, places: how many values of each group are compared. seen: grp, step: at which steps any was. tied: grp, step, place,
    position of values without a majority.
    scalars: rank, step, name, value. places: place, phase, kind, name, call, slot, micro. fingerprints: whether there are any.
    """

    differing: pa.Table
    bad: pa.Table
    compared: pa.Table
    seen: pa.Table
    tied: pa.Table
    scalars: pa.Table
    places: pa.Table
    fingerprints: bool


def examine(task: RankTask) -> Examined:
    """Look at one share. Raises FormatError where a file cannot be read."""
    duck = Duck()
    share, files = task.share, task.files
    sample = sorted({rank for group in share.groups for rank in group.sample})
    references = {to for rank in (*sample, *share.ranks) if (to := files[rank].reference) is not None}
    shown = sorted({*sample, *references})
    duck.add("members", _members(share))
    duck.add("sampled", pa.table({"rank": pa.array(sample, pa.int32())}))
    duck.add("repeated", _pairs(task.repeated))
    duck.add("refers", refers_table([files[rank] for rank in {*shown, *share.ranks}]))
    place, value = _load_sample(duck, [files[rank] for rank in shown])
    _find_majority(duck)
    _load_share(duck, [files[rank] for rank in share.ranks], place, value)
    _expand(duck)
    return Examined(
        differing=duck.table(_DIFFERING),
        bad=duck.table(_BAD),
        compared=duck.table("select grp, count(*) as places from replicated group by grp order by grp"),
        seen=duck.table("select distinct grp, step from majority order by grp, step"),
        tied=duck.table(_TIED),
        scalars=duck.table(_SCALARS),
        places=duck.table(_PLACES),
        fingerprints=value == "checksum",
    )


def _members(share: Share) -> pa.Table:
    pairs = [(rank, group.number) for group in share.groups for rank in {*group.sample, *share.parts[group.number]}]
    return pa.table(
        {"rank": pa.array([rank for rank, _ in pairs], pa.int32()), "grp": pa.array([grp for _, grp in pairs], pa.int32())}
    )


def _pairs(pairs: Iterable[tuple[int, int]]) -> pa.Table:
    listed = [*pairs]
    return pa.table(
        {"rank": pa.array([rank for rank, _ in listed], pa.int32()), "step": pa.array([step for _, step in listed], pa.int64())}
    )


def refers_table(files: Sequence[RankFiles]) -> pa.Table:
    """Return which ranks refer to which, and for which steps: rank, reference, first, last."""
    rows = [(f.rank, to.rank, first, last) for f in files for to in f.same_as for first, last in to.steps]
    ranks, references, firsts, lasts = zip(*rows, strict=True) if rows else ((), (), (), ())
    kinds = (pa.int32(), pa.int32(), pa.int64(), pa.int64())
    names = ("rank", "reference", "first", "last")
    columns = (ranks, references, firsts, lasts)
    return pa.table({n: pa.array(c, k) for n, c, k in zip(names, columns, kinds, strict=True)})


def source_of(duck: Duck, name: str, files: Sequence[RankFiles]) -> str:
    """Return SQL for all rows of some ranks as they are stored, in segments and in streams that were left open."""
    live = [table for one in files if one.live and (table := live_table(one.folder)) is not None]
    source = duck.source(name, [segment for one in files for segment in one.segments], live)
    # a share of ranks that have no row at all: an empty table with the columns of the log
    return source or f"(select * from ({_EMPTY}) where false)"


_EMPTY = (
    "select 0::int rank, 0::bigint step, 0::int position, '' kind, '' phase, '' name, 0::int call, '' slot, 0::int micro, "
    "'' dtype, '' shape, "
    "0::bigint count, 0::bigint nan, 0::bigint posinf, 0::bigint neginf, 0::bigint zero, 0.0::double min, 0.0::double max, "
    "0.0::double mean, 0.0::double norm, 0::ubigint checksum, 0.0::double as value"
)


def _load_sample(duck: Duck, files: Sequence[RankFiles]) -> tuple[str, str]:
    """Load the rows of the sampled ranks and of references as `shown`; return SQL for the place and the identity of a value."""
    source = source_of(duck, "sample", files)
    duck.run(
        f"create table raw as select rank, step, position, kind, phase, name, call, slot, micro, checksum, "
        f"{_NUMBERS} as numbers, {_CONSTANT} as constant, nan + posinf as bad, value from {source} where position is not null"
    )
    fingerprints = duck.table(f"select count(checksum) as n from raw where kind in {COMPARED}")["n"][0].as_py() > 0
    value = "checksum" if fingerprints else "numbers"
    duck.run("create table spelled as select distinct kind, name, slot, phase, call, micro from raw")
    place = next(p for p in _PLACES_BY if p == _PLACES_BY[-1] or _is_unique(duck, p))
    duck.run(f"create table known as select {place} as place, * from spelled")
    duck.run(
        f"create table shown as select rank, step, position, {place} as place, "
        f"kind in {COMPARED} and {value} is not null as compared, {value} as id, constant, bad, "
        "case when kind = 'scalar' then name end as scalar, value from raw"
    )
    duck.run("drop table raw")
    return place, "checksum" if fingerprints else _NUMBERS


def _is_unique(duck: Duck, place: str) -> bool:
    return duck.table(f"select count(*) = count(distinct {place}) as apart from spelled")["apart"][0].as_py()


def _find_majority(duck: Duck) -> None:
    """Work out `majority`: what most of a group's sample hold (`id`, null in a tie), of the values that replicas share."""
    duck.run(
        "create table full_sample as select m.grp, s.* from shown s join sampled using (rank) join members m using (rank) "
        "union all by name "
        f"select m.grp, {_INHERITED} from sampled join refers f using (rank) join members m using (rank) "
        "join shown s on s.rank = f.reference and s.step between f.first and f.last "
        "where not exists (from shown o where o.rank = f.rank and o.step = s.step and o.position = s.position) "
        "and exists (from shown o where o.rank = f.rank and o.step = s.step)"
    )
    duck.run("delete from full_sample s where exists (from repeated r where r.rank = s.rank and r.step = s.step)")
    duck.run(
        "create table counted as select grp, step, place, arg_max(id, n) as id, max(n) as held, sum(n) as ranks, "
        "bool_and(constant) as constant, min(position) as position from (select grp, step, place, id, count(*) as n, "
        "bool_and(constant) as constant, min(position) as position from full_sample where compared group by all) group by all"
    )
    duck.run(
        "create table replicated as select grp, place, min(step) as since from counted where not constant group by all "
        "having arg_min(2 * held > ranks and ranks > 1, step)"
    )
    duck.run(
        "create table majority as select c.grp, c.step, c.place, c.position, case when 2 * held > ranks then id end as id "
        "from counted c join replicated r using (grp, place) where ranks > 1"
    )


_INHERITED = "f.rank, s.step, s.position, s.place, s.compared, s.id, s.constant, s.bad, s.scalar, s.value"


def _load_share(duck: Duck, files: Sequence[RankFiles], place: str, value: str) -> None:
    duck.run(
        f"create table own as select rank, step, position, {place} as place, kind in {COMPARED} as compared, {value} as id, "
        "nan + posinf as bad, case when kind = 'scalar' then name end as scalar, value "
        f"from {source_of(duck, 'share', files)} where position is not null"
    )


def _expand(duck: Duck) -> None:
    """Work out `odd`: values of the share's ranks that are not the majority's or not finite, those of their references too."""
    against = "left join majority j on j.grp = m.grp and j.step = s.step and j.place = s.place and s.compared"
    differs = "(j.place is not null and (j.id is null or s.id <> j.id))"
    duck.run(
        f"create table reference_odd as select s.*, {differs} as differs from shown s join members m using (rank) {against} "
        f"where s.rank in (select reference from refers) and ({differs} or s.bad > 0 or s.scalar is not null)"
    )
    duck.run(
        f"create table odd as select s.rank, s.step, s.position, s.place, s.bad, s.scalar, s.value, {differs} as differs "
        f"from own s join members m using (rank) {against} where {differs} or s.bad > 0 or s.scalar is not null"
    )
    duck.run(
        "insert into odd select f.rank, s.step, s.position, s.place, s.bad, s.scalar, s.value, s.differs from refers f "
        "join reference_odd s on s.rank = f.reference and s.step between f.first and f.last "
        "where f.rank in (select rank from own) "
        "and exists (from own o where o.rank = f.rank and o.step = s.step) "
        "and not exists (from own o where o.rank = f.rank and o.step = s.step and o.position = s.position)"
    )
    duck.run("update odd set differs = false where exists (from repeated r where r.rank = odd.rank and r.step = odd.step)")


_FIRST = "select rank, step, count(*) as n, min(position) as position, arg_min(place, position) as place from odd"
_DIFFERING = f"{_FIRST} where differs group by rank, step order by rank, step"
_BAD = f"{_FIRST} where bad > 0 group by rank, step order by rank, step"
_TIED = (
    "select grp, step, count(*) as n, min(position) as position, arg_min(place, position) as place from majority "
    "where id is null group by grp, step order by grp, step"
)
_SCALARS = "select rank, step, scalar as name, value from odd where scalar is not null order by rank, step, name"
_PLACES = (
    "select k.* from known k where k.place in (select place from odd where differs or bad > 0 union select place from majority "
    "where id is null) order by k.place"
)
