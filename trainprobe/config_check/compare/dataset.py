"""Compares the data of each micro-step, and explains how it differs: order, shift, other batching, other data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainprobe.config_check.compare.sides import absent, rank_findings, rank_pairs
from trainprobe.config_check.compare.values import close, same
from trainprobe.config_check.compare.verdicts import Check, Finding, Level, counted, number_ranges, shown, which_ranks
from trainprobe.config_check.pack import Pack

COLUMNS = ("micro-step", "rank", "tensor", "bench checksum", "cmp checksum", "bench", "cmp", "level")
STATISTICS = ("max", "min", "mean", "norm")
EXPLAINED_BY = (
    *(
        "setting seed",
        "setting data_seed",
        "setting shuffle",
        "setting micro_batch_size",
        "setting global_batch_size",
        "setting sequence_length",
    ),
    *("setting vocabulary", "random seed", "random calls"),
)
Batch = Mapping[str, Mapping[str, Any]]


def compare_dataset(bench: Pack, cmp: Pack) -> Check:
    """Compare fingerprints; statistics where a pack holds no fingerprints."""
    if (early := absent("dataset", COLUMNS, bench, cmp)) is not None:
        return early
    pairs = list(rank_pairs(bench, cmp, "dataset"))
    rows: list[tuple[Any, ...]] = []
    first: dict[int, int] = {}
    told: dict[str, list[int]] = {}
    plain: dict[Finding, list[int]] = {}
    findings = rank_findings("dataset", bench, cmp)
    for rank, a, b in pairs:
        left, right = a.by_micro["dataset"], b.by_micro["dataset"]
        for micro in sorted(left.keys() & right.keys()):
            different = _rows(rank, micro, left[micro].get("tensors", {}), right[micro].get("tensors", {}), rows)
            if different and rank not in first:
                first[rank] = micro
        for finding in _scalars(rank, left, right, rows) if bench.world_size == cmp.world_size else ():
            plain.setdefault(finding, []).append(rank)
        if left.keys() != right.keys():
            findings.append(_count_finding(rank, left, right))
        if rank in first:
            told.setdefault(_explain(_sequence(left), _sequence(right), first[rank]), []).append(rank)
    ranks = [rank for rank, _, _ in pairs]
    findings += [Finding(f.level, f"{f.text}{which_ranks(where, ranks)}", f.topic) for f, where in plain.items()]
    if bench.world_size != cmp.world_size:
        other = _other_size(bench, cmp, bool(first))
        if other is not None:
            passed = [(*row[:-1], "note") if other.level == "note" and row[-1] == "error" else row for row in rows]
            return Check("dataset", COLUMNS, passed, (*findings, other))
    if exchanged := _exchanged(bench, cmp, first):
        told = {exchanged: ranks}
    for text, where in told.items():
        findings.append(Finding("error", f"{text}{which_ranks(where, ranks)}", "dataset", EXPLAINED_BY))
    return Check("dataset", COLUMNS, rows, tuple(findings))


def _scalars(rank: int, left: Mapping[int, Any], right: Mapping[int, Any], rows: list[tuple[Any, ...]]) -> list[Finding]:
    """Compare what the model is called with beside tensors; return a finding for each that differs, where it first does.

    What one side does not give may have that value by default: a warning. None is as good as not given. Packs of other tools do
    not tell any of it.
    """
    told: dict[str, Finding] = {}
    for micro in sorted(left.keys() & right.keys()):
        a, b = (_given(side[micro]) for side in (left, right))
        for name in dict.fromkeys((*a, *b)) if "scalars" in left[micro] and "scalars" in right[micro] else ():
            x, y = (shown(side[name]) if name in side else "(not given)" for side in (a, b))
            both = name in a and name in b
            equal = both and same(a[name], b[name])
            level: Level = "error" if both else "warning"
            rows.append((micro, rank, name, "", "", x, y, "pass" if equal else level))
            if not equal and name not in told:
                text = f"{name}, with which the model is called, differs from micro-step {micro} on: {x} and {y}"
                told[name] = Finding(level, text, f"argument {name}")
    return list(told.values())


def _given(step: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in dict(step.get("scalars") or {}).items() if value is not None}


def _other_size(bench: Pack, cmp: Pack, differs: bool) -> Finding | None:
    """Judge the data of two jobs with different numbers of ranks; None where the ranks have to be told one by one."""
    sizes = f"{counted(bench.world_size, 'rank')} and {counted(cmp.world_size, 'rank')}"
    if _same_samples(bench, cmp):
        return Finding("note", f"the same samples were split over {sizes}", "dataset")
    if differs:
        return None
    if len({tuple(map(_key, _sequence(r.by_micro.get("dataset", {})))) for p in (bench, cmp) for r in p.ranks.values()}) == 1:
        return Finding("note", f"each rank sees the same data, on {sizes}", "dataset")
    return Finding(
        "error",
        f"with {sizes} the data differs: the further ranks see samples that the other job does not",
        "dataset",
        EXPLAINED_BY,
    )


def _count_finding(rank: int, left: Mapping[int, Any], right: Mapping[int, Any]) -> Finding:
    extra = sorted(left.keys() ^ right.keys())
    side = "cmp" if extra[0] in left else "bench"
    which = (
        f"micro-step {extra[0]} of rank {rank} is"
        if len(extra) == 1
        else f"micro-steps {number_ranges(extra)} of rank {rank} are"
    )
    text = f"{which} missing in {side}: {len(left)} and {len(right)} were captured"
    return Finding("warning", text, "captured micro-steps")


def _rows(rank: int, micro: int, a: Batch, b: Batch, rows: list[tuple[Any, ...]]) -> bool:
    """Add a row a tensor; tell whether any differs."""
    different = False
    lone_a, lone_b = [n for n in a if n not in b], [n for n in b if n not in a]
    if len(lone_a) == len(lone_b):  # the same arguments under other names, as another tool or wrapper calls them
        b = {**b, **{x: b[y] for x, y in zip(lone_a, lone_b, strict=True)}}
        b = {name: entry for name, entry in b.items() if name not in lone_b}
    for name in [*a, *(n for n in b if n not in a)]:
        left, right = a.get(name), b.get(name)
        equal = left is not None and right is not None and same_tensor(left, right)
        different = different or not equal
        rows.append((micro, rank, name, _sum(left), _sum(right), describe(left), describe(right), "pass" if equal else "error"))
    return different


def same_tensor(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Tell whether two entries are of the same tensor: by fingerprint, shape and dtype, else by statistics."""
    if "checksum" in a and "checksum" in b:
        return a["checksum"] == b["checksum"] and a.get("shape") == b.get("shape") and a.get("dtype") == b.get("dtype")
    shapes = a.get("shape"), b.get("shape")
    if None not in shapes and shapes[0] != shapes[1]:
        return False
    common = [key for key in STATISTICS if key in a and key in b]
    return bool(common) and all(close(a[key], b[key]) for key in common)


def describe(entry: Mapping[str, Any] | None) -> str:
    """Return shape, dtype and statistics of an entry in one line."""
    if entry is None:
        return "(missing)"
    shape = f"{entry['dtype']} {list(entry['shape'])}" if "shape" in entry else ""
    numbers = ", ".join(f"{key} {_number(entry[key])}" for key in STATISTICS if key in entry)
    return f"{shape} {numbers}".strip() or str(entry.get("note", ""))


def _number(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _sum(entry: Mapping[str, Any] | None) -> str:
    return "(missing)" if entry is None else str(entry.get("checksum", "(statistics only)"))


def _key(batch: Batch) -> tuple[Any, ...]:
    """Return what identifies a batch, however its tensors are named."""
    return tuple(sorted(str(e.get("checksum") or [e.get(s) for s in STATISTICS]) for e in batch.values()))


def _sequence(steps: Mapping[int, Any]) -> list[Batch]:
    return [steps[micro].get("tensors", {}) for micro in sorted(steps)]


def _explain(a: Sequence[Batch], b: Sequence[Batch], first: int) -> str:
    """Say in one clause how two sequences of batches differ. first: the first micro-step that does."""
    since = "" if first == 0 else f" from micro-step {first} on"
    which = "the first batch" if first == 0 else f"the data{since}"
    left, right = [_key(x) for x in a], [_key(x) for x in b]
    names = _differing_names(a, b, first)
    if len(names) > 1 and left == right:
        return f"{' and '.join(names)} hold each other's values{since}"
    shift = _shift(left, right)
    if shift:
        later = "cmp" if shift > 0 else "bench"
        return f"the same batches come {counted(abs(shift), 'micro-step')} later in {later}"
    if Counter(left) == Counter(right):
        return f"the same batches come in another order{since}"
    if replaced := _replaced(a, b, first):
        return replaced
    samples = _sample_story(a, b)
    if samples:
        return f"{samples}{since}"
    if names and a[first] and len(names) < len(a[first]):
        verb = "differs" if len(names) == 1 else "differ"
        return f"{' and '.join(names)} {verb} from micro-step {first} on, the rest of the batch is equal"
    shared = (Counter(left) & Counter(right)).total()
    if shared and first == 0:
        return f"the first batch differs, {shared} of {len(left)} batches are shared in another order"
    shapes = [{n: e.get("shape") for n, e in x[first].items()} for x in (a, b)]
    if shapes[0] != shapes[1] and all(None not in s.values() for s in shapes):
        return f"{which} differ{'s' if first == 0 else ''} in shape: {_shapes(shapes[0])} and {_shapes(shapes[1])}"
    return "the data is other data altogether" if first == 0 and not shared else f"{which} differs"


def _shapes(shapes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in list(shapes.items())[:3])


def _differing_names(a: Sequence[Batch], b: Sequence[Batch], first: int) -> list[str]:
    return sorted(n for n in a[first].keys() & b[first].keys() if not same_tensor(a[first][n], b[first][n]))


def _shift(a: list[Any], b: list[Any]) -> int:
    """Return k where b[i + k] == a[i] for all i that both have, 0 where there is none; constant data has no shift."""
    if len(set(a)) < 2:
        return 0
    for k in range(1, min(len(a), len(b))):
        if a[: len(b) - k] == b[k : k + len(a)]:
            return k
        if b[: len(a) - k] == a[k : k + len(b)]:
            return -k
    return 0


def _samples(batches: Sequence[Batch]) -> Counter[Any]:
    """Count samples; a sample is what all tensors of its batch hold at its index."""
    return Counter(_rows_of(batches))


def _rows_of(batches: Sequence[Batch]) -> list[tuple[Any, ...]]:
    """Return the samples of all batches in order."""
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        columns = [e["samples"] for e in batch.values() if "samples" in e]
        longest = max((len(c) for c in columns), default=0)
        found += [tuple(sorted(row)) for row in zip(*(c for c in columns if len(c) == longest), strict=True)]
    return found


def _replaced(a: Sequence[Batch], b: Sequence[Batch], first: int) -> str:
    """Say that a few samples are others, where all the rest stands in its place."""
    left, right = _rows_of(a), _rows_of(b)
    if not left or len(left) != len(right):
        return ""
    others = sum(x != y for x, y in zip(left, right, strict=True))
    kept = (Counter(left) & Counter(right)).total()
    if not others or others * 2 > len(left) or kept != len(left) - others:
        return ""
    names = _differing_names(a, b, first)
    what = f" in {' and '.join(names)}" if names and len(names) < len(a[first]) else ""
    verb = "is" if others == 1 else "are"
    return f"the data differs from micro-step {first} on: {others} of {len(left)} samples {verb} replaced{what}"


def _sample_story(a: Sequence[Batch], b: Sequence[Batch]) -> str:
    left, right = _samples(a), _samples(b)
    if not left or not right:
        return ""
    shared = (left & right).total()
    sizes = [[next(iter(x.values()), {}).get("shape") for x in side] for side in (a, b)]
    if left == right and sizes[0] == sizes[1]:
        return "the same samples come in another order"
    if shared == min(left.total(), right.total()):
        return "the same samples are cut into batches of another size"
    if shared >= max(2, max(left.total(), right.total()) // 4):
        return f"{shared} of {left.total()} samples are shared, in another order"
    return ""


def _same_samples(bench: Pack, cmp: Pack) -> bool:
    """Tell whether all ranks together saw the same samples, as far as the shorter capture goes."""
    sides = [_in_order(pack) for pack in (bench, cmp)]
    totals = [_samples(batches).total() for batches in sides]
    if min(totals) == 0:
        return False
    short, long = (sides[0], sides[1]) if totals[0] <= totals[1] else (sides[1], sides[0])
    wanted = _samples(short)
    for end in range(1, len(long) + 1):
        seen = _samples(long[:end])
        if seen.total() >= wanted.total():
            return seen == wanted
    return False


def _in_order(pack: Pack) -> list[Batch]:
    micros = sorted({m for r in pack.ranks.values() for m in r.by_micro.get("dataset", {})})
    held = [(r.by_micro.get("dataset", {}), m) for m in micros for r in pack.ranks.values()]
    return [steps[m].get("tensors", {}) for steps, m in held if m in steps]


def _exchanged(bench: Pack, cmp: Pack, first: Mapping[int, int]) -> str:
    """Say that ranks see each other's data, where they do."""
    if len(first) < 2:
        return ""
    of = {r: tuple(map(_key, _sequence(c.by_micro.get("dataset", {})))) for r, c in bench.ranks.items()}
    by = {r: tuple(map(_key, _sequence(c.by_micro.get("dataset", {})))) for r, c in cmp.ranks.items()}
    swapped = [r for r in first if by.get(r) != of.get(r) and by.get(r) in [of[s] for s in of if s != r]]
    return f"ranks {number_ranges(swapped)} see each other's data" if len(swapped) == len(first) else ""
