"""Why two checkpoints differ, where one cause explains many tensors: what the first line says.

A cause is looked for in what was measured (a constant factor, norms that are one apart), in tensors that were found again under
other names (exchanged layers, gate and up), and in the rows of matrices (another order of the same rows). It is named only for
tensors of which every element fits it within the rounding of the stored formats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.cover import cover
from trainprobe.ckpt_compare.masters import rounded
from trainprobe.ckpt_compare.pairing import Move
from trainprobe.ckpt_compare.pieces import LogicalTensor
from trainprobe.ckpt_compare.work import release
from trainprobe.engine.diff.difference import Difference
from trainprobe.engine.diff.number_formats import decode, number_format
from trainprobe.errors import FormatError

LARGEST = 256 << 20  # bytes of a matrix whose rows are looked at
MOST = 64  # matrices of one kind of which the rows are looked at
Values = npt.NDArray[np.float64]
SHOWN = 8  # layers in a sentence
_LAYER = re.compile(r"(?<![A-Za-z_])(?:layers?|blocks?|h)\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.)experts\.(\d+)\.")
_ROTARY = re.compile(r".*\.attention\.[qk]\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class Cause:
    """One sentence, and the keys of the tensors that it explains."""

    sentence: str
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Odd:
    """A tensor that differs: its key, both sides, and what was measured."""

    key: str
    a: LogicalTensor
    b: LogicalTensor
    difference: Difference


def find_causes(odd: Sequence[Odd], moves: Sequence[Move]) -> tuple[Cause, ...]:
    """Return the causes that were found, those that explain the most tensors first."""
    found = [*_layers(moves), *_experts(moves), *_parts(moves), *_transposed(moves), *_factor(odd), *_norms(odd)]
    explained = {key for cause in found for key in cause.keys}
    rest = [o for o in odd if o.key not in explained]
    found += [*_masters(rest), *_fused(rest), *_rows(rest)]
    return tuple(sorted(found, key=lambda cause: -len(cause.keys)))


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


def _layers(moves: Sequence[Move]) -> Iterator[Cause]:
    """Find layers that are exchanged, shifted, or in another order."""
    for layers in _moved(moves, _LAYER).values():
        swapped = {(a, b) for a, b in layers if (b, a) in layers}
        for a, b in sorted(pair for pair in swapped if pair[0] < pair[1]):
            yield Cause(f"layers {a} and {b} are exchanged", frozenset(layers[a, b] | layers[b, a]))
        rest = {pair: keys for pair, keys in layers.items() if pair not in swapped}
        steps = Counter(b - a for a, b in rest)
        for step in (step for step, count in steps.items() if count > 2):
            text = f"{steps[step]} layers of B hold those that stand {abs(step)} {'earlier' if step > 0 else 'later'} in A"
            yield Cause(text, frozenset(k for (a, b), keys in rest.items() if b - a == step for k in keys))
        rest = {pair: keys for pair, keys in rest.items() if steps[pair[1] - pair[0]] <= 2}
        if len(rest) > 1:
            order = sorted((b, a) for a, b in rest)[:SHOWN]
            text = f"layers {_listed(b for b, _ in order)} of B hold layers {_listed(a for _, a in order)} of A"
            yield Cause(text, frozenset(k for keys in rest.values() for k in keys))


def _listed(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


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
        layer = _LAYER.search(stems[0]) if len(stems) == 1 else None
        text = f"experts {a} and {b} {f'of layer {layer[1]} ' if layer else ''}are exchanged"
        text += f" in {len(stems)} layers" if len(stems) > 1 else ""
        yield Cause(text, frozenset(by_pair[a, b]))


def _parts(moves: Sequence[Move]) -> Iterator[Cause]:
    """Find two matrices of a module that hold each other's values: gate and up, k and v."""
    pairs = {(m.a_key, m.b_key) for m in moves if not m.turned}
    for parts in (("gate", "up"), ("k", "v"), ("q", "k"), ("q", "v")):
        keys = {b for a, b in pairs if (b, a) in pairs and {_part(a), _part(b)} == set(parts) and _stem(a) == _stem(b)}
        places = {_stem(key) for key in keys}
        if places:
            experts = sum(".experts." in place for place in places)
            where = f"{experts} expert" if experts == len(places) else f"{len(places)} layer"
            text = f"{parts[0]} and {parts[1]} are exchanged in {where}{'s' if len(places) > 1 else ''}"
            yield Cause(text, frozenset(keys))


def _part(key: str) -> str:
    return key.partition("#")[0].split(".")[-2] if "." in key else key


def _stem(key: str) -> str:
    return key.partition("#")[0].rpartition(".")[0].rpartition(".")[0]


def _transposed(moves: Sequence[Move]) -> Iterator[Cause]:
    keys = frozenset(m.b_key for m in moves if m.turned and m.a_key == m.b_key)
    if keys:
        yield Cause(f"{_count(keys)} transposed in B", keys)


def _count(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}, are"


def _factor(odd: Sequence[Odd]) -> Iterator[Cause]:
    """Find tensors that are a multiple of those of the other side: the same factor, rounded to three digits."""
    by_factor: dict[str, set[str]] = {}
    for o in odd:
        d = o.difference
        if min(d.square_a, d.square_b) > 0 and d.count > 1 and not (d.misplaced or d.nan_a or d.nan_b):
            factor = d.dot / d.square_a
            left = d.square_b - factor * d.dot  # what B has beside factor × A
            if abs(factor - 1) > 0.01 and left <= 1e-4 * d.square_b and abs(factor) > 1e-12:
                by_factor.setdefault(f"{factor:.3g}", set()).add(o.key)
    for factor, keys in by_factor.items():
        if len(keys) > 1 or len(odd) == 1:
            yield Cause(f"{_count(keys)} {factor} times as large in B as in A", frozenset(keys))


def _norms(odd: Sequence[Odd]) -> Iterator[Cause]:
    """Find norms whose weights are one apart: zero-centred in one checkpoint and not in the other."""
    apart = {o.key: _one_apart(o) for o in odd if len(o.a.shape) == 1 and "norm" in o.key.lower()}
    for side in ("A", "B"):
        keys = {key for key, lower in apart.items() if lower == side}
        if keys:
            yield Cause(f"{_count(keys)} zero-centred in {side}: one less than in the other", frozenset(keys))


def _one_apart(o: Odd) -> str:
    """Return the side whose values are all one less than those of the other; nothing where that is not so."""
    d = o.difference
    if d.misplaced or not d.count or abs(d.max_abs - 1) > 0.02 or abs(d.square_d / d.count - 1) > 0.02:
        return ""
    a, b = dense(o.a), dense(o.b)
    if a is None or b is None or a.shape != b.shape:
        return ""
    return "A" if np.all(b > a) else "B" if np.all(a > b) else ""


def _masters(odd: Sequence[Odd]) -> Iterator[Cause]:
    """Find masters of one side that are 16-bit numbers: taken from the weights, and not from the optimizer."""
    masters = [o for o in odd if o.a.slot == "master"]
    for side in ("A", "B"):
        keys: dict[str, set[str]] = {}
        for o in masters:
            one, other = (o.a, o.b) if side == "A" else (o.b, o.a)
            fmt = _short(one)
            if fmt and not _short(other):
                keys.setdefault(fmt, set()).add(o.key)
        for fmt, held in keys.items():
            text = (
                f"the masters of {side} are {fmt} numbers in {len(held)} tensors: its weights were loaded without its optimizer"
            )
            yield Cause(text, frozenset(held))


def _short(tensor: LogicalTensor) -> str:
    """Return the 16-bit format whose numbers a float32 tensor holds, or nothing."""
    values = dense(tensor)
    if values is None or tensor.format.name != "float32" or not np.any(values):
        return ""
    raw = values.astype(np.float32)
    if not np.any(raw.view(np.uint32) & np.uint32(0xFFFF)):
        return "bfloat16"
    with np.errstate(over="ignore"):
        return "float16" if np.array_equal(raw.astype(np.float16).astype(np.float32), raw) else ""


def _fused(odd: Sequence[Odd]) -> Iterator[Cause]:
    """Find attention whose q, k and v hold each other's rows: fused in another order than was assumed."""
    by_layer: dict[str, dict[str, Odd]] = {}
    for o in odd:
        match = re.fullmatch(r"(.*\.attention)\.([qkv])\.weight", o.key)
        if match:
            by_layer.setdefault(match[1], {})[match[2]] = o
    keys: set[str] = set()
    for parts in list(by_layer.values())[:MOST]:
        if len(parts) > 1 and _same_rows([o.a for o in parts.values()], [o.b for o in parts.values()]):
            keys.update(o.key for o in parts.values() if not _same_rows([o.a], [o.b]))
    if keys:
        text = "q, k and v hold each other's rows: one side is interleaved by query group and the other is not"
        yield Cause(f"{text} ({len(keys)} tensors)", frozenset(keys))


def _rows(odd: Sequence[Odd]) -> Iterator[Cause]:
    """Find matrices that hold the same rows in another order."""
    found: dict[str, set[str]] = {}
    seen: Counter[str] = Counter()
    for o in odd:
        kind = re.sub(r"\d+", "*", o.key)
        seen[kind] += 1
        if not o.a.slot and o.a.shape and seen[kind] <= MOST and o.a.shape == o.b.shape and _same_rows([o.a], [o.b]):
            found.setdefault(_order(o), set()).add(o.key)
    for order, keys in found.items():
        yield Cause(f"{_count(keys)} {order}", frozenset(keys))


def _order(o: Odd) -> str:
    if _ROTARY.fullmatch(o.key):
        rows, sides = o.a.shape[0], _comparable(o.a, o.b)
        for dim in (d for d in range(4, min(rows, 1024) + 1, 2) if rows % d == 0):
            if sides is None:
                break
            x, y = sides
            halves = np.arange(rows).reshape(-1, 2, dim // 2).transpose(0, 2, 1).reshape(-1)  # pairs made of two halves
            if np.array_equal(x[halves], y):
                return f"in the other rotary order: halves in A, interleaved pairs in B (heads of {dim})"
            if np.array_equal(x, y[halves]):
                return f"in the other rotary order: interleaved pairs in A, halves in B (heads of {dim})"
    what = "rows of the router" if ".router." in o.key else "rows"
    return f"the same in another order of {what}"


def _same_rows(a: Sequence[LogicalTensor], b: Sequence[LogicalTensor]) -> bool:
    """Whether both sides hold the same rows, in any order and dealt out to the tensors in any way."""
    left: Counter[bytes] = Counter()
    right: Counter[bytes] = Counter()
    for one, other in zip(a, b, strict=True):
        sides = _comparable(one, other)
        if sides is None or sides[0].ndim < 1 or sides[1].ndim < 1:
            return False
        left.update(row.tobytes() for row in sides[0])
        right.update(row.tobytes() for row in sides[1])
    return left == right and len(left) > 1


def _comparable(a: LogicalTensor, b: LogicalTensor) -> tuple[Values, Values] | None:
    """Return the values of both sides, the finer one rounded to the coarser format; None where they cannot be had."""
    x, y = dense(a), dense(b)
    if x is None or y is None:
        return None
    if a.format == b.format:
        return x, y
    fine, coarse = (a, b) if a.format.itemsize > b.format.itemsize else (b, a)
    if coarse.format.name not in ("float32", "float16", "bfloat16"):
        return None
    bits = rounded((x if fine is a else y).astype(np.float32), number_format("float32"), coarse.format)
    near = decode(bits, coarse.format).astype(np.float64)
    return (near, y) if fine is a else (x, near)


def dense(tensor: LogicalTensor) -> Values | None:
    """Return the values of a whole tensor; None for one that is too large, incomplete or cannot be read."""
    if not tensor.pieces or tensor.count * 8 > LARGEST:
        return None
    held = cover(tensor)
    if held.uncovered:
        return None
    values = np.empty(tensor.shape)
    try:
        for part in held.parts:
            values[part.box.within((0,) * len(tensor.shape))] = decode(part.load(), part.piece.source.format)
            release(part.piece.source)
    except FormatError:
        return None
    return values


def headline(causes: Sequence[Cause], odd: Mapping[str, object]) -> str:
    """Return what to say first: the causes that together explain at least half of what differs, at most three of them."""
    said: list[str] = []
    explained: set[str] = set()
    for cause in causes[:3]:
        if cause.keys - explained:
            said.append(cause.sentence)
            explained |= cause.keys
    return "; ".join(said) if 2 * len(explained & set(odd)) >= len(odd) else ""
