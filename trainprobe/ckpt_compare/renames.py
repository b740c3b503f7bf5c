"""Parameters that all layers of one side call otherwise: found by the values of some, and then paired by name in all.

Between two versions of a library `encoder.layer.0.output.dense.weight` may become `layers.0.mlp.fc2.weight`. Where layers hold
equal values the names of that kind are known, and the others are compared under them too: one that differs is then a difference
and not two tensors without a partner, and layers that stand in another place are seen. A kind that holds nothing equal is
paired only if it is the only one left of its numbers and shapes on both sides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from trainprobe.ckpt_compare.pairing import Move, explain_moves
from trainprobe.ckpt_compare.pieces import LogicalTensor

_NUMBER = re.compile(r"(?<![A-Za-z_\d])\d+(?![A-Za-z_\d])")
Numbers = tuple[int, ...]


def follow_renames(left: Mapping[str, LogicalTensor], right: Mapping[str, LogicalTensor]) -> dict[str, str]:
    """Return key in B → key in A for tensors whose kind of parameter has another name in B, wherever they stand."""
    only_a, only_b = {k for k in left if k not in right}, {k for k in right if k not in left}
    if len(only_a) < 2 or len(only_b) < 2:
        return {}
    moves = explain_moves(only_a | only_b, {k: left[k] for k in only_a}, {k: right[k] for k in only_b})
    kinds = _kinds(moves)
    known = [pair for pair, numbers in kinds.items() if _permuted_or_in_place(numbers)]
    named_a, named_b = ({pair[side] for pair in kinds} for side in (0, 1))
    rest_a, rest_b = _by_kind(only_a, named_a), _by_kind(only_b, named_b)
    known += list(_by_elimination(rest_a, rest_b, left, right)) if known else []
    return {
        by_numbers[numbers]: a_key
        for kind, other in known
        for numbers, a_key in _members(only_a, kind).items()
        if numbers in (by_numbers := _members(only_b, other)) and left[a_key].shape == right[by_numbers[numbers]].shape
    }


def _by_kind(keys: Iterable[str], known: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in sorted(keys, key=_split):
        kind = _split(key)[0]
        if kind not in known:
            found.setdefault(kind, []).append(key)
    return found


def _by_elimination(
    rest_a: Mapping[str, list[str]],
    rest_b: Mapping[str, list[str]],
    left: Mapping[str, LogicalTensor],
    right: Mapping[str, LogicalTensor],
) -> Iterator[tuple[str, str]]:
    """Yield the kinds without equal values that alone have their numbers and shapes, on both sides."""

    def alike(keys: list[str], tensors: Mapping[str, LogicalTensor]) -> tuple[object, ...]:
        return tuple((_split(key)[1], tensors[key].shape, tensors[key].slot) for key in keys)

    forms_a, forms_b = (
        {kind: alike(keys, tensors) for kind, keys in rest.items()} for rest, tensors in ((rest_a, left), (rest_b, right))
    )
    often_a, often_b = Counter(forms_a.values()), Counter(forms_b.values())
    for kind, form in forms_a.items():
        if often_a[form] == often_b[form] == 1:
            yield kind, next(other for other, its in forms_b.items() if its == form)


def _split(key: str) -> tuple[str, Numbers]:
    """Split a key into its kind (`layers.*.mlp.fc2.weight`) and its numbers."""
    return _NUMBER.sub("*", key), tuple(map(int, _NUMBER.findall(key)))


def _members(keys: Iterable[str], kind: str) -> dict[Numbers, str]:
    return {numbers: key for key in keys for name, numbers in [_split(key)] if name == kind}


def _kinds(moves: Sequence[Move]) -> dict[tuple[str, str], list[tuple[Numbers, Numbers]]]:
    """Return (kind in A, kind in B) → numbers of the tensors that hold the same; each kind with the one it meets most often."""
    found: dict[tuple[str, str], list[tuple[Numbers, Numbers]]] = {}
    for move in moves:
        (a, at), (b, to) = _split(move.a_key), _split(move.b_key)
        if not move.turned and at and len(at) == len(to):
            found.setdefault((a, b), []).append((at, to))
    often = Counter({pair: len(numbers) for pair, numbers in found.items()}).most_common()
    taken: set[tuple[str, str]] = set()
    chosen: list[tuple[str, str]] = []
    for (a, b), _ in often:
        if ("A", a) not in taken and ("B", b) not in taken:
            taken |= {("A", a), ("B", b)}
            chosen.append((a, b))
    return {pair: found[pair] for pair in chosen}


def _permuted_or_in_place(pairs: Sequence[tuple[Numbers, Numbers]]) -> bool:
    """Whether the numbers of a kind mean the same on both sides: equal, or the same numbers in another order.

    Layers that are merely counted from another number stay in their order, with other numbers.
    """
    return all(a == b for a, b in pairs) or [b for _, b in sorted(pairs)] != sorted(b for _, b in pairs)


def under_names_of_a(right: Mapping[str, LogicalTensor], names: Mapping[str, str]) -> Mapping[str, LogicalTensor]:
    """Return B's tensors by the keys that A has for them (`follow_renames`)."""
    if not names:
        return right
    found = (t.renamed(names[k].partition("#")[0]) if k in names else t for k, t in right.items())
    return {t.key: t for t in found}
