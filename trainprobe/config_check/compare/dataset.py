"""Compares the data of each micro-step, and explains how it differs: order, shift, other batching, other data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainprobe.config_check.compare.batch_sequences import explain, samples
from trainprobe.config_check.compare.entries import Batch, batch_key, describe, same_tensor
from trainprobe.config_check.compare.pair import absent, rank_findings, rank_pairs
from trainprobe.config_check.compare.values import same
from trainprobe.config_check.compare.verdicts import Check, Level, PackFinding, shown, which_ranks
from trainprobe.config_check.pack import BESIDE, Pack, RankPack
from trainprobe.engine.core.words import counted, numbered

COLUMNS = ("micro-step", "rank", "tensor", "bench checksum", "cmp checksum", "bench", "cmp", "level")
_SEEDS = ("setting seed", "setting data_seed", "random seed", "generator seed")
_LOADING = (
    *(
        "setting shuffle",
        "setting micro_batch_size",
        "setting global_batch_size",
        "setting sequence_length",
        "setting vocabulary",
    ),
    *("setting data_workers", "setting samples", "key sampler", "key batch_sampler", "key generator", "key dataset"),
    *("key worker_init_fn", "key collate_fn", "source loader", "flag default_dtype"),
)
EXPLAINED_BY = (*_SEEDS, *_LOADING, "random calls")
ORDER = "another order"


def compare_dataset(bench: Pack, cmp: Pack) -> Check:
    """Compare fingerprints; statistics where a pack holds no fingerprints."""
    if (early := absent("dataset", COLUMNS, bench, cmp)) is not None:
        return early
    bench, cmp, apart = _with_equal_labels(bench, cmp)
    pairs = list(rank_pairs(bench, cmp, "dataset"))
    rows: list[tuple[Any, ...]] = []
    first: dict[int, int] = {}
    ranks_by_text: dict[str, list[int]] = {}
    plain: dict[PackFinding, list[int]] = {}
    findings = [*rank_findings("dataset", bench, cmp), *apart]
    for rank, a, b in pairs:
        left, right = a.by_micro["dataset"], b.by_micro["dataset"]
        micro = _first_difference(rank, left, right, rows)
        if micro is not None:
            first[rank] = micro
        for finding in _scalars(rank, left, right, rows) if bench.world_size == cmp.world_size else ():
            plain.setdefault(finding, []).append(rank)
        if left.keys() != right.keys():
            findings.append(_count_finding(rank, left, right))
        if rank in first:
            ranks_by_text.setdefault(explain(_sequence(left), _sequence(right), first[rank]), []).append(rank)
    ranks = [rank for rank, _, _ in pairs]
    findings += [PackFinding(f.level, f"{f.text}{which_ranks(where, ranks)}", f.topic) for f, where in plain.items()]
    if bench.world_size != cmp.world_size:
        other = _other_size(bench, cmp, bool(first))
        if other is not None:
            passed = [(*row[:-1], "note") if other.level == "note" and row[-1] == "error" else row for row in rows]
            return Check("dataset", COLUMNS, passed, (*findings, other))
    if exchanged := _exchanged(bench, cmp, first):
        ranks_by_text = {exchanged: ranks}
    findings += (_difference(text, which_ranks(where, ranks)) for text, where in ranks_by_text.items())
    return Check("dataset", COLUMNS, rows, tuple(findings))


def _first_difference(rank: int, left: Mapping[int, Any], right: Mapping[int, Any], rows: list[tuple[Any, ...]]) -> int | None:
    """Add a row for each tensor of the micro-steps of both sides; return the first that differs."""
    both = sorted(left.keys() & right.keys())
    differ = [m for m in both if _rows(rank, m, left[m].get("tensors", {}), right[m].get("tensors", {}), rows)]
    return differ[0] if differ else None


def _with_equal_labels(bench: Pack, cmp: Pack) -> tuple[Pack, Pack, list[PackFinding]]:
    """Leave labels out where one side alone has them: of another tool or version, a compiled model, a loss in the model."""
    labelled = [_labelled(pack) for pack in (bench, cmp)]
    if labelled[0] == labelled[1]:
        return bench, cmp, []
    bench, cmp = (_without_labels(pack) if has else pack for pack, has in zip((bench, cmp), labelled, strict=True))
    side = "bench" if labelled[0] else "cmp"
    text = f"data beside the model's inputs (labels) was captured in {side} only: not compared"
    return bench, cmp, [PackFinding("note", text, "labels")]


def _difference(text: str, ranks: str) -> PackFinding:
    """Return the error; the order of the data says more than the calls that shuffled it."""
    topic, causes = ("dataset order", (*_SEEDS, *_LOADING)) if ORDER in text else ("dataset", EXPLAINED_BY)
    return PackFinding("error", f"{text}{ranks}", topic, causes)


def _labelled(pack: Pack) -> bool:
    """Whether a pack holds data that did not go through the model."""
    steps = [step for rank in pack.ranks.values() for step in rank.by_micro.get("dataset", {}).values()]
    return any(BESIDE in entry for step in steps for entry in step.get("tensors", {}).values())


def _without_labels(pack: Pack) -> Pack:
    return replace(pack, ranks={number: _rank_without_labels(rank) for number, rank in pack.ranks.items()})


def _rank_without_labels(rank: RankPack) -> RankPack:
    steps = {
        micro: {**step, "tensors": {n: e for n, e in step.get("tensors", {}).items() if BESIDE not in e}}
        for micro, step in rank.by_micro.get("dataset", {}).items()
    }
    return replace(rank, by_micro={**rank.by_micro, "dataset": steps})


def _scalars(rank: int, left: Mapping[int, Any], right: Mapping[int, Any], rows: list[tuple[Any, ...]]) -> list[PackFinding]:
    """Compare what the model is called with beside tensors; return a finding for each that differs, where it first does.

    What one side does not give may have that value by default: a warning. None is as good as not given. Packs of other tools do
    not tell any of it.
    """
    by_name: dict[str, PackFinding] = {}
    for micro in sorted(left.keys() & right.keys()):
        a, b = (_given(side[micro]) for side in (left, right))
        for name in dict.fromkeys((*a, *b)) if "scalars" in left[micro] and "scalars" in right[micro] else ():
            x, y = (shown(side[name]) if name in side else "(not given)" for side in (a, b))
            both = name in a and name in b
            equal = both and same(a[name], b[name])
            level: Level = "error" if both else "warning"
            rows.append((micro, rank, name, "", "", x, y, "pass" if equal else level))
            if not equal and name not in by_name:
                text = f"{name}, with which the model is called, differs from micro-step {micro} on: {x} and {y}"
                by_name[name] = PackFinding(level, text, f"argument {name}")
    return list(by_name.values())


def _given(step: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in dict(step.get("scalars") or {}).items() if value is not None}


def _other_size(bench: Pack, cmp: Pack, differs: bool) -> PackFinding | None:
    """Judge the data of two jobs with different numbers of ranks; None where the ranks have to be told one by one."""
    sizes = f"{counted(bench.world_size, 'rank')} and {counted(cmp.world_size, 'rank')}"
    if _same_samples(bench, cmp):
        return PackFinding("note", f"the same samples were split over {sizes}", "dataset")
    if differs:
        return None
    if (
        len({tuple(map(batch_key, _sequence(r.by_micro.get("dataset", {})))) for p in (bench, cmp) for r in p.ranks.values()})
        == 1
    ):
        return PackFinding("note", f"each rank sees the same data, on {sizes}", "dataset")
    return PackFinding(
        "error",
        f"with {sizes} the data differs: the further ranks see samples that the other job does not",
        "dataset",
        EXPLAINED_BY,
    )


def _count_finding(rank: int, left: Mapping[int, Any], right: Mapping[int, Any]) -> PackFinding:
    extra = sorted(left.keys() ^ right.keys())
    side = "cmp" if extra[0] in left else "bench"
    which = f"{numbered('micro-step', extra)} of rank {rank} {'is' if len(extra) == 1 else 'are'}"
    text = f"{which} missing in {side}: {len(left)} and {len(right)} were captured"
    return PackFinding("warning", text, "captured micro-steps")


def _rows(rank: int, micro: int, a: Batch, b: Batch, rows: list[tuple[Any, ...]]) -> bool:
    """Add a row a tensor; tell whether any differs."""
    different = False
    only_a, only_b = [n for n in a if n not in b], [n for n in b if n not in a]
    if len(only_a) == len(only_b):  # the same arguments under other names, as another tool or wrapper calls them
        b = {**b, **{x: b[y] for x, y in zip(only_a, only_b, strict=True)}}
        b = {name: entry for name, entry in b.items() if name not in only_b}
    for name in [*a, *(n for n in b if n not in a)]:
        left, right = a.get(name), b.get(name)
        equal = left is not None and right is not None and same_tensor(left, right)
        different = different or not equal
        rows.append((micro, rank, name, _sum(left), _sum(right), describe(left), describe(right), "pass" if equal else "error"))
    return different


def _sum(entry: Mapping[str, Any] | None) -> str:
    return "(missing)" if entry is None else str(entry.get("checksum", "(statistics only)"))


def _sequence(steps: Mapping[int, Any]) -> list[Batch]:
    return [steps[micro].get("tensors", {}) for micro in sorted(steps)]


def _same_samples(bench: Pack, cmp: Pack) -> bool:
    """Tell whether all ranks together saw the same samples, as far as the shorter capture goes."""
    sides = [_in_order(pack) for pack in (bench, cmp)]
    totals = [samples(batches).total() for batches in sides]
    if min(totals) == 0:
        return False
    short, long = (sides[0], sides[1]) if totals[0] <= totals[1] else (sides[1], sides[0])
    needed = samples(short)
    for end in range(1, len(long) + 1):
        seen = samples(long[:end])
        if seen.total() >= needed.total():
            return seen == needed
    return False


def _in_order(pack: Pack) -> list[Batch]:
    micros = sorted({m for r in pack.ranks.values() for m in r.by_micro.get("dataset", {})})
    held = [(r.by_micro.get("dataset", {}), m) for m in micros for r in pack.ranks.values()]
    return [steps[m].get("tensors", {}) for steps, m in held if m in steps]


def _exchanged(bench: Pack, cmp: Pack, first: Mapping[int, int]) -> str:
    """Say that ranks see each other's data, where they do."""
    if len(first) < 2:
        return ""
    of = {r: tuple(map(batch_key, _sequence(c.by_micro.get("dataset", {})))) for r, c in bench.ranks.items()}
    by = {r: tuple(map(batch_key, _sequence(c.by_micro.get("dataset", {})))) for r, c in cmp.ranks.items()}
    swapped = [r for r in first if by.get(r) != of.get(r) and by.get(r) in [of[s] for s in of if s != r]]
    return f"{numbered('rank', swapped)} see each other's data" if len(swapped) == len(first) else ""
