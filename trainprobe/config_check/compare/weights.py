"""Compares weights: which differ, since when, which have only another name, which are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainprobe.config_check.compare.entries import STATISTICS, describe, same_tensor
from trainprobe.config_check.compare.frameworks import framework_of
from trainprobe.config_check.compare.pair import BENCH, CMP, absent, common_ranks, rank_findings
from trainprobe.config_check.compare.values import close
from trainprobe.config_check.compare.verdicts import Check, PackFinding, shown, which_ranks
from trainprobe.config_check.pack import Pack
from trainprobe.engine.compare.movement import moved_otherwise, shares
from trainprobe.engine.core.words import counted

COLUMNS = ("micro-step", "rank", "weight", "name in cmp", "bench checksum", "cmp checksum", "bench", "cmp", "level")
INITIAL = (
    "setting seed",
    "setting initialization",
    "setting layers",
    "setting hidden_size",
    "random seed",
    "random calls",
    "model",
    "flag default_dtype",
)
ROUNDED = ("variable ", "package ", "flag ")  # what makes weights of the start differ by rounding alone
_SUMMED = 1e-9  # relative: statistics of the same numbers, summed in another order
Entries = Mapping[str, Mapping[str, Any]]


@dataclass
class _Sorted:
    """What was found, sorted by kind; weight and rank each. different: micro-step → rank → names."""

    rows: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    different: dict[int, dict[int, list[str]]] = field(default_factory=dict[int, dict[int, list[str]]])
    one_sided: dict[tuple[str, str], list[int]] = field(default_factory=dict[tuple[str, str], list[int]])
    renamed: dict[tuple[str, str], list[int]] = field(default_factory=dict[tuple[str, str], list[int]])
    gradients: dict[tuple[str, bool], list[int]] = field(default_factory=dict[tuple[str, bool], list[int]])
    rounded: dict[str, None] = field(default_factory=dict[str, None])


def compare_weights(bench: Pack, cmp: Pack) -> Check:
    """Compare fingerprints of all weights of all ranks; statistics where a pack holds no fingerprints."""
    if (early := absent("weights", COLUMNS, bench, cmp)) is not None:
        return early
    found = _Sorted()
    findings = rank_findings("weights", bench, cmp)
    across = framework_of(bench) != framework_of(cmp)
    ranks = [r for r in common_ranks(bench, cmp) if bench.ranks[r].has("weights") and cmp.ranks[r].has("weights")]
    for rank in ranks:
        left, right = bench.ranks[rank].by_micro["weights"], cmp.ranks[rank].by_micro["weights"]
        start: tuple[Entries, Entries] | None = None
        for i, micro in enumerate(sorted(left.keys() & right.keys())):
            rounding = micro > 0 and bench.world_size != cmp.world_size  # gradients were summed in another order
            sides = left[micro].get("parameters", {}), right[micro].get("parameters", {})
            if start is not None and across and _moved_alike(*start, *sides, steps=i):
                found.rounded.update(
                    {name: None for name in sides[0] if not same_tensor(sides[0][name], sides[1].get(name, {}))}
                )
                sides = sides[0], {**sides[1], **{name: sides[0][name] for name in found.rounded if name in sides[1]}}
            start = start or sides
            _sort(found, micro, rank, *sides, rounding)
        if left.keys() != right.keys():
            text = f"weights of rank {rank} were captured at {counted(len(left), 'micro-step')} and {len(right)}"
            findings.append(PackFinding("warning", text, "captured weights", ("captured micro-steps",)))
    findings += _differing(found.different, bench, cmp, ranks)
    findings += _one_sided(found.one_sided, ranks)
    findings += _gradients(found.gradients, ranks)
    if found.rounded:
        text = f"{counted(len(found.rounded), 'weight')} differ after the first step by no more than frameworks round"
        findings.append(PackFinding("note", text, "rounded weights"))
    if found.renamed:
        (old, new), *_ = found.renamed
        verb = "has" if len(found.renamed) == 1 else "have"
        text = f"{counted(len(found.renamed), 'weight')} {verb} another name and equal values: {old} is {new} in cmp"
        findings.append(PackFinding("warning", text, "weight names", ("model",)))
    return Check("weights", COLUMNS, found.rows, tuple(findings))


def _sort(found: _Sorted, micro: int, rank: int, a: Entries, b: Entries, rounding: bool) -> None:
    """Compare the weights of one rank at one micro-step."""
    names = _counterparts(a, b)
    for name in [*a, *(n for n in b if n not in names.values())]:
        other = names.get(name)
        left, right = a.get(name), b.get(other) if other is not None else b.get(name) if name not in a else None
        equal = False
        if left is None or right is None:
            found.one_sided.setdefault((name, BENCH if right is None else CMP), []).append(rank)
        else:
            if left.get("requires_grad", None) is not None and right.get("requires_grad") == (not left["requires_grad"]):
                where = found.gradients.setdefault((name, left["requires_grad"]), [])
                where += [] if rank in where else [rank]
            equal = same_tensor(left, right) or (rounding and _nearly(left, right))
            if not equal:
                found.different.setdefault(micro, {}).setdefault(rank, []).append(name)
            elif other != name:
                found.renamed.setdefault((name, str(other)), []).append(rank)
        level = "error" if not equal else "pass" if other == name else "warning"
        found.rows.append((micro, rank, name, other or "", *_texts(left, right), level))


def _texts(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    sums = ["(missing)" if e is None else str(e.get("checksum", "(statistics only)")) for e in (a, b)]
    return sums[0], sums[1], describe(a), describe(b)


def _counterparts(a: Entries, b: Entries) -> dict[str, str]:
    """Return the name in b of each name in a: the same, else the only free one with the same bits or statistics."""
    found = {name: name for name in a if name in b}
    free = [n for n in b if n not in a]
    by_content: dict[str, list[str]] = {}
    for name in free:
        by_content.setdefault(_content(b[name]), []).append(name)
    for name in a:
        if name not in found and by_content.get(_content(a[name])):
            found[name] = by_content[_content(a[name])].pop(0)
    return found


def _nearly(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float = 1e-3) -> bool:
    """Tell whether two entries are equal up to the rounding of a few steps."""
    return a.get("shape") == b.get("shape") and all(
        close(a[k], b[k], tolerance) for k in ("norm", "max", "min") if k in a and k in b
    )


def _moved_alike(a0: Entries, b0: Entries, a: Entries, b: Entries, steps: int) -> bool:
    """Tell whether the weights of two frameworks that were equal at the start have moved alike since."""
    equal = [name for name in a if name in a0 and name in b0 and name in b and same_tensor(a0[name], b0[name])]
    found = shares((n, _statistics(a0[n]), _statistics(b0[n]), _statistics(a[n]), _statistics(b[n])) for n in equal)
    return bool(equal) and moved_otherwise(found, steps) is None


def _statistics(entry: Mapping[str, Any]) -> dict[str, float]:
    return {key: entry[key] for key in STATISTICS if key in entry}


def _content(entry: Mapping[str, Any]) -> str:
    return f"{entry.get('shape')} {entry.get('checksum') or [entry.get(s) for s in STATISTICS]}"


def _differing(different: Mapping[int, Mapping[int, list[str]]], bench: Pack, cmp: Pack, ranks: list[int]) -> list[PackFinding]:
    if not different:
        return []
    micro = min(different)
    by_rank = different[micro]
    where = which_ranks(list(by_rank), ranks)
    names = list(dict.fromkeys(n for names in by_rank.values() for n in names))
    total = len(bench.ranks[ranks[0]].by_micro["weights"][micro].get("parameters", {}))
    one = names[0]
    rank = next(iter(by_rank))
    left, right = (p.ranks[rank].by_micro["weights"][micro]["parameters"].get(one, {}) for p in (bench, cmp))
    what = f"weight {one} differs" if len(names) == 1 else f"{len(names)} of {total} weights differ"
    if micro == min(bench.ranks[rank].by_micro["weights"]):
        pairs = [
            [p.ranks[r].by_micro["weights"][micro]["parameters"].get(n, {}) for p in (bench, cmp)] for r, n in _each(by_rank)
        ]
        rounded = all(_nearly(a, b, 1e-5) for a, b in pairs)
        when, explained = "from the start", (*INITIAL, *(ROUNDED if rounded else ()))
    else:
        when, explained = f"from micro-step {micro} on (equal before)", ("",)
    if bench.world_size != cmp.world_size and explained == ("",):
        return [PackFinding("note", f"{what} {when}, as training on another number of ranks makes them{where}", "weights")]
    first = "" if len(names) == 1 else f"{one} first, "
    return [PackFinding("error", f"{what} {when}: {first}{_measure(left, right)}{where}", "weights", explained)]


def _each(by_rank: Mapping[int, list[str]]) -> list[tuple[int, str]]:
    return [(rank, name) for rank, names in by_rank.items() for name in names]


def _measure(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Say the most telling statistic that differs."""
    if a.get("shape") != b.get("shape") and a.get("shape") and b.get("shape"):
        return f"shape {list(a['shape'])} and {list(b['shape'])}"
    if a.get("dtype") != b.get("dtype") and a.get("dtype") and b.get("dtype"):
        return f"{a['dtype']} and {b['dtype']}"
    held = [key for key in ("norm", "mean", "max", "min") if key in a and key in b]
    if len(held) == 4 and all(close(a[key], b[key], _SUMMED) for key in held):
        square = len(a.get("shape") or ()) == 2 and len({*a["shape"]}) == 1
        transposed = " (a transposed matrix?)" if square else ""
        return f"other bits with equal statistics, as the same numbers in another order have{transposed}"
    for key in held:
        if a[key] != b[key]:
            return f"{key} {shown(a[key])} and {shown(b[key])}"
    return "other bits with equal statistics"


def _gradients(found: Mapping[tuple[str, bool], list[int]], ranks: list[int]) -> list[PackFinding]:
    """Say which parameters are trained on one side and frozen on the other."""
    findings: list[PackFinding] = []
    for side, trained in ((CMP, True), (BENCH, False)):
        names = [name for name, left in found if left is trained]
        if names:
            where = which_ranks(sorted({r for (_, left), rs in found.items() if left is trained for r in rs}), ranks)
            which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more weights"
            sides = "true and false" if trained else "false and true"
            text = f"requires_grad of {which} differs: {sides} ({'is' if len(names) == 1 else 'are'} frozen in {side}){where}"
            findings.append(PackFinding("error", text, "requires_grad"))
    return findings


def _one_sided(one_sided: Mapping[tuple[str, str], list[int]], ranks: list[int]) -> list[PackFinding]:
    found: list[PackFinding] = []
    for side in (BENCH, CMP):
        names = [name for name, s in one_sided if s == side]
        if names:
            where = which_ranks(sorted({r for (_, s), rs in one_sided.items() if s == side for r in rs}), ranks)
            text = (
                f"weight {names[0]} is only in {side}"
                if len(names) == 1
                else f"{len(names)} weights are only in {side}, {names[0]} the first"
            )
            found.append(PackFinding("error", f"{text}{where}", "lone weights", ("model", "setting layers")))
    return found
