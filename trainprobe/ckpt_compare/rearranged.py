"""Tensors that hold the same rows or columns in another order, and the order where it is a simple one.

Parts of one module that families fuse (q, k and v; gate and up) are looked at as one, since an order crosses them.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.cause import MOST, Cause, Mismatch, Sides, Values, comparable, count
from trainprobe.ckpt_compare.pieces import LogicalTensor

Order = npt.NDArray[np.int64]
_FUSED = re.compile(r"(?P<stem>.*)\.(?P<part>q|k|v|gate|up)\.(?P<kind>weight|bias)")
_ROTARY = re.compile(r".*\.attention\.[qk]\.(weight|bias)$")
_PORTIONS = {2: "halves", 3: "thirds", 4: "quarters"}
BY_GROUP = "one side is interleaved by query group and the other is not"


def rearranged(mismatches: Sequence[Mismatch], sides: Sides) -> Iterator[Cause]:
    """Find tensors of another order. sides: all tensors, as parts that agree belong to an order too."""
    found: dict[tuple[str, bool], set[str]] = {}
    kinds: Counter[str] = Counter()
    groups: dict[tuple[str, ...], list[Mismatch]] = {}
    for o in mismatches:
        groups.setdefault(_siblings(o.key, sides), []).append(o)
    for keys, members in groups.items():
        kind = re.sub(r"\d+", "*", keys[0])
        kinds[kind] += 1
        if kinds[kind] > MOST or members[0].a.slot:
            continue
        alone = [(o, said) for o in members if (said := _order_of(o))]
        if len(alone) == len(members) or len(keys) == 1:
            for o, said in alone:
                found.setdefault((said, False), set()).add(o.key)
        elif said := _crossing(keys, [(sides[0][key], sides[1][key]) for key in keys]):
            found.setdefault((said, True), set()).update(o.key for o in members)
    for (said, crossing), keys in found.items():
        number = f"{len(keys)} tensors" if len(keys) > 1 else next(iter(keys))
        yield Cause(f"{said} ({number})" if crossing else f"{count(keys)} {said}", frozenset(keys))


def _siblings(key: str, sides: Sides) -> tuple[str, ...]:
    match = _FUSED.fullmatch(key)
    if match is None:
        return (key,)
    parts = ("q", "k", "v") if match["part"] in "qkv" else ("gate", "up")
    return tuple(k for p in parts if (k := f"{match['stem']}.{p}.{match['kind']}") in sides[0] and k in sides[1])


def _order_of(o: Mismatch) -> str:
    """Say in which order one tensor holds the rows or columns of the other side; nothing where it does not."""
    sides = comparable(o.a, o.b) if o.a.shape and o.a.shape == o.b.shape else None
    if sides is None:
        return ""
    for axis in range(len(o.a.shape)):
        order = permutation(*sides, axis)
        if order is not None:
            what = "rows" if axis == 0 or axis < len(o.a.shape) - 1 else "columns"
            what = f"{what} of the router" if ".router." in o.key else what
            return _rotary(o, order) or described(order, what)
    return ""


def _rotary(o: Mismatch, order: Order) -> str:
    rows = len(order)
    for dim in (d for d in range(4, min(rows, 1024) + 1, 2) if rows % d == 0 and _ROTARY.fullmatch(o.key)):
        halves = np.arange(rows).reshape(-1, 2, dim // 2).transpose(0, 2, 1).reshape(-1)  # pairs made of two halves
        if np.array_equal(order, halves):
            return f"in the other rotary order: halves in A, interleaved pairs in B (heads of {dim})"
        if np.array_equal(np.argsort(order), halves):
            return f"in the other rotary order: interleaved pairs in A, halves in B (heads of {dim})"
    return ""


def _crossing(keys: Sequence[str], pairs: Sequence[tuple[LogicalTensor, LogicalTensor]]) -> str:
    """Say how fused parts hold each other's rows; nothing where together they do not hold the same rows."""
    sides = [comparable(a, b) for a, b in pairs]
    known = [side for side in sides if side is not None and side[0].shape[1:] == side[1].shape[1:] and side[0].ndim]
    if len(known) < len(keys) or len({side[0].shape[1:] for side in known}) > 1:
        return ""
    order = permutation(np.concatenate([x for x, _ in known]), np.concatenate([y for _, y in known]), 0)
    if order is None:
        return ""
    names = [str(key.split(".")[-2]) for key in keys]
    sizes = [len(x) for x, _ in known]
    head = f"{', '.join(names[:-1])} and {names[-1]} hold each other's rows: "
    return head + (
        _by_group(order, sizes) or _whole_parts(order, names, sizes) or described(order, "rows").removeprefix("the same ")
    )


def _by_group(order: Order, sizes: Sequence[int]) -> str:
    if len(sizes) != 3:
        return ""
    starts = np.cumsum([0, *sizes])
    for groups in (g for g in range(2, sizes[1] + 1) if all(n % g == 0 for n in sizes)):
        shares = [np.arange(n).reshape(groups, -1) + start for n, start in zip(sizes, starts, strict=False)]
        dealt = np.concatenate(shares, axis=1).reshape(-1)
        if np.array_equal(order, dealt) or np.array_equal(np.argsort(order), dealt):
            return BY_GROUP
    return ""


def _whole_parts(order: Order, names: Sequence[str], sizes: Sequence[int]) -> str:
    """Return `k, q, v in B and q, k, v in A` where the parts only follow each other in another order."""
    starts = dict(zip(np.cumsum([0, *sizes[:-1]]).tolist(), range(len(sizes)), strict=True))
    at, seen = 0, list[int]()
    while at < len(order):
        part = starts.get(int(order[at]))
        if part is None or not np.array_equal(order[at : at + sizes[part]], np.arange(sizes[part]) + order[at]):
            return ""
        seen.append(part)
        at += sizes[part]
    return f"{', '.join(names[p] for p in seen)} in B and {', '.join(names)} in A, one after the other"


def permutation(x: Values, y: Values, axis: int) -> Order | None:
    """Return which slice of x each slice of y along an axis is; None where they are not the same slices, or in one order."""
    if x.shape != y.shape or x.shape[axis] < 2:
        return None
    left, right = (np.ascontiguousarray(np.moveaxis(v, axis, 0)).reshape(v.shape[axis], -1) for v in (x, y))
    sums = [np.sort(v.sum(axis=1)) for v in (left, right)]
    if not np.array_equal(*sums, equal_nan=True):
        return None
    places: dict[bytes, deque[int]] = {}
    for i, row in enumerate(left):
        places.setdefault(row.tobytes(), deque()).append(i)
    found: list[int] = []
    for row in right:
        held = places.get(row.tobytes())
        if not held:
            return None
        found.append(held.popleft())
    order = np.array(found, np.int64)
    return None if np.array_equal(order, np.arange(len(order))) else order


def described(order: Order, what: str) -> str:
    """Return the order in words: reversed, portions exchanged, dealt out in turn; another order where it is none of these."""
    n = len(order)
    if np.array_equal(order, np.arange(n)[::-1]):
        return f"the same {what} in reverse order"
    for portions in (p for p in range(2, 9) if n % p == 0 and n > p):
        cut = order.reshape(portions, -1)
        if np.array_equal(cut, cut[:, :1] + np.arange(n // portions)) and not np.any(cut[:, 0] % (n // portions)):
            name = f"{_PORTIONS[portions]} of {what}" if portions in _PORTIONS else f"portions of {n // portions} {what}"
            if portions == 2:
                return f"the same with their {name} exchanged"
            return f"the same with their {name} in the order {', '.join(str(c * portions // n + 1) for c in cut[:, 0])}"
    for parts in (p for p in range(2, min(n, 256) + 1) if n % p == 0):
        for size in (s for s in range(1, n // parts) if n % (parts * s) == 0):
            dealt = np.arange(n).reshape(parts, -1, size).transpose(1, 0, 2).reshape(-1)
            for side, seen in (("B", order), ("A", np.argsort(order))):
                if np.array_equal(seen, dealt):
                    each = f"{size} {what}" if size > 1 else f"one of the {what}"
                    return f"the same, interleaved in {side}: {each} of each of {parts} parts in turn"
    return f"the same in another order of {what}"
