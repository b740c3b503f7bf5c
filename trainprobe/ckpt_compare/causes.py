"""Why two checkpoints differ, where one cause explains many tensors: what the first line says.

A cause is looked for in what was measured (a constant factor, norms that are one apart), in tensors that were found again under
other names (exchanged layers, gate and up), and in the rows of matrices (another order of the same rows). It is named only for
tensors of which every element fits it within the rounding of the stored formats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from trainprobe.ckpt_compare.cause import Cause, Mismatch, Sides, count, listed
from trainprobe.ckpt_compare.differing_files import files_alone
from trainprobe.ckpt_compare.pairing import Move
from trainprobe.ckpt_compare.quantised_causes import quantised
from trainprobe.ckpt_compare.rearranged import rearranged
from trainprobe.ckpt_compare.value_causes import (
    LAYER,
    centred_norms,
    exchanged_moments,
    factors,
    layers_alone,
    masters,
    roundings,
    updates,
    zeros,
)

_EXPERT = re.compile(r"(?<=\.)experts\.(\d+)\.")
_PARTS = {  # what the parts of a module are called in other families
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "query": "q", "key": "k", "value": "v",
    "to_q": "q", "to_k": "k", "to_v": "v", "wq": "q", "wk": "k", "wv": "v",
    "gate_proj": "gate", "up_proj": "up", "w1": "gate", "w3": "up", "wi_0": "gate", "wi_1": "up",
}  # fmt: skip
_USUAL_ORDER = "qkv"


def find_causes(
    mismatches: Sequence[Mismatch],
    moves: Sequence[Move],
    copies: Sequence[tuple[Move, str]],
    sides: Sides,
    every: Collection[str],
) -> tuple[Cause, ...]:
    """Return the causes that were found, those that explain the most tensors first.

    copies: tensors that hold what another one holds on the other side. sides: all tensors of both; every: all keys.
    """
    wide = [o for o in mismatches if not o.sparse]
    found = [*_layers(moves, every), *_experts(moves), *_parts(moves), *_transposed(moves), *exchanged_moments(wide)]
    found += [*_copies(copies, sides), *quantised(wide)]
    rest = _unexplained(wide, found)
    found += [*zeros(rest), *factors(rest), *centred_norms(rest)]
    rest = _unexplained(wide, found)
    found += [*masters(rest), *rearranged(rest, sides)]
    rest = _unexplained(wide, found)
    found += [*roundings(rest), *updates(rest)]
    if not found:
        found += layers_alone(mismatches, every)
        found += files_alone(mismatches, sides, lambda parts: [*factors(parts), *roundings(parts)])
    return tuple(sorted(found, key=lambda cause: -len(cause.keys)))


def _unexplained(mismatches: Sequence[Mismatch], causes: Sequence[Cause]) -> list[Mismatch]:
    explained = {key for cause in causes for key in cause.keys}
    return [o for o in mismatches if o.key not in explained]


def _moved(moves: Iterable[Move], numbered: re.Pattern[str]) -> dict[str, dict[tuple[int, int], set[str]]]:
    """Return (number in A, number in B) → keys of B that hold the same parameter of that other layer or expert.

    By what stands before the number, as the experts of one layer are not those of another.
    """
    found: dict[str, dict[tuple[int, int], set[str]]] = {}
    for move in moves:
        a, b = numbered.search(move.a_key), numbered.search(move.b_key)
        if a and b and a[1] != b[1] and numbered.sub("*", move.a_key, 1) == numbered.sub("*", move.b_key, 1):
            places = found.setdefault(move.b_key[: b.start()], {})
            places.setdefault((int(a[1]), int(b[1])), set()).add(move.b_key)
    return found


def _layers(moves: Sequence[Move], every: Collection[str]) -> Iterator[Cause]:
    """Find layers that are exchanged, shifted, or in another order."""
    for layers in _moved(moves, LAYER).values():
        swapped = {(a, b) for a, b in layers if (b, a) in layers}
        for a, b in sorted(pair for pair in swapped if pair[0] < pair[1]):
            keys = frozenset(layers[a, b] | layers[b, a])
            what = _what_of(keys, every)
            yield Cause(f"{what}layers {a} and {b} {'is' if what and len(keys) == 2 else 'are'} exchanged", keys)
        rest = {pair: keys for pair, keys in layers.items() if pair not in swapped}
        steps = Counter(b - a for a, b in rest)
        for step in (step for step, often in steps.items() if often > 2):
            text = f"{steps[step]} layers of B hold those that stand {abs(step)} {'earlier' if step > 0 else 'later'} in A"
            yield Cause(text, frozenset(k for (a, b), keys in rest.items() if b - a == step for k in keys))
        rest = {pair: keys for pair, keys in rest.items() if steps[pair[1] - pair[0]] <= 2}
        if len(rest) > 1:
            order = sorted((b, a) for a, b in rest)[:8]
            text = f"layers {listed(b for b, _ in order)} of B hold layers {listed(a for _, a in order)} of A"
            yield Cause(text, frozenset(k for keys in rest.values() for k in keys))


def _what_of(keys: Collection[str], every: Collection[str]) -> str:
    """Return which parameters of two layers are meant, where these are less than half of what the layers hold."""
    first = LAYER.search(min(keys))
    parts = sorted({key[m.end() :] for key in keys if (m := LAYER.search(key))})
    if first is None or 2 * len(parts) >= sum(key.startswith(first.string[: first.end()]) for key in every):
        return ""
    return f"{' and '.join(parts[:2])}{f' and {len(parts) - 2} more parameters' if len(parts) > 2 else ''} of "


def _experts(moves: Sequence[Move]) -> Iterator[Cause]:
    """Find experts of one layer that are exchanged, or in another order."""
    exchanged: dict[tuple[int, int], list[str]] = {}
    by_pair: dict[tuple[int, int], set[str]] = {}
    for stem, experts in _moved(moves, _EXPERT).items():
        swaps = [(a, b) for a, b in experts if a < b and (b, a) in experts]
        if 2 * len(swaps) < len(experts):
            yield Cause(f"{stem}experts are in another order", frozenset(k for keys in experts.values() for k in keys))
            continue
        for pair in swaps:
            exchanged.setdefault(pair, []).append(stem)
            by_pair.setdefault(pair, set()).update(experts[pair] | experts[pair[1], pair[0]])
    for (a, b), stems in exchanged.items():
        layer = LAYER.search(stems[0]) if len(stems) == 1 else None
        text = f"experts {a} and {b} {f'of layer {layer[1]} ' if layer else ''}are exchanged"
        text += f" in {len(stems)} layers" if len(stems) > 1 else ""
        yield Cause(text, frozenset(by_pair[a, b]))


def _parts(moves: Sequence[Move]) -> Iterator[Cause]:
    """Find two matrices of a module that hold each other's values: gate and up, k and v, any two of equal shape."""
    pairs = {(m.a_key, m.b_key) for m in moves if not m.turned}
    exchanged: dict[tuple[str, ...], set[str]] = {}
    for a, b in pairs:
        parts = sorted({_part(a), _part(b)}, key=lambda part: (_USUAL_ORDER.find(part) if part in _USUAL_ORDER else 9, part))
        if len(parts) == 2 and (b, a) in pairs and _stem(a) == _stem(b):
            exchanged.setdefault(tuple(parts), set()).add(b)
    for (first, second), keys in sorted(exchanged.items()):
        places = {_stem(key) for key in keys}
        experts = sum(".experts." in place for place in places)
        where = f"{experts} expert" if experts == len(places) else f"{len(places)} layer"
        yield Cause(f"{first} and {second} are exchanged in {where}{'s' if len(places) > 1 else ''}", frozenset(keys))


def _part(key: str) -> str:
    name = key.partition("#")[0].split(".")[-2] if "." in key else key
    return _PARTS.get(name, name)


def _stem(key: str) -> str:
    return key.partition("#")[0].rpartition(".")[0].rpartition(".")[0]


def _copies(copies: Sequence[tuple[Move, str]], sides: Sides) -> Iterator[Cause]:
    """Find tensors that hold another one, which is in its own place as well: a loader took the wrong name."""
    said: dict[str, set[str]] = {}
    for move, side in copies:
        at = "AB".index(side)
        own, other = sides[at][move.b_key], sides[1 - at][move.a_key]
        names = (own.native, other.native) if own.native and other.native and own.native != other.native else None
        mine, its = _where_apart(*(names or (move.b_key, move.a_key)))
        said.setdefault(f"{mine} of {side} holds {its} of {'BA'[at]}", set()).add(move.b_key)
    for sentence, keys in said.items():
        yield Cause(f"{sentence} ({len(keys)} tensor{'s' if len(keys) > 1 else ''})", frozenset(keys))


def _where_apart(one: str, other: str) -> tuple[str, str]:
    """Return the parts of two dotted names that are not the same; of numbers with what stands before them."""
    first, second = one.split("."), other.split(".")
    ahead = next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), 0)
    behind = next((i for i, (x, y) in enumerate(zip(first[::-1], second[::-1], strict=False)) if x != y), 0)
    ahead -= ahead > 0 and (first[ahead].isdecimal() or second[ahead].isdecimal())
    return ".".join(first[ahead : len(first) - behind]), ".".join(second[ahead : len(second) - behind])


def _transposed(moves: Sequence[Move]) -> Iterator[Cause]:
    keys = frozenset(m.b_key for m in moves if m.turned and m.a_key == m.b_key)
    if keys:
        yield Cause(f"{count(keys)} transposed in B", keys)


def headline(causes: Sequence[Cause], mismatches: Mapping[str, object]) -> str:
    """Return what to say first: the causes that together explain at least half of what differs, at most three of them."""
    said: list[str] = []
    explained: set[str] = set()
    for cause in causes[:3]:
        if cause.keys - explained:
            said.append(cause.sentence)
            explained |= cause.keys
    return "; ".join(said) if 2 * len(explained & set(mismatches)) >= len(mismatches) else ""
