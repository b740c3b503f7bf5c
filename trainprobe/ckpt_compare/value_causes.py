"""Causes that show in the values of tensors under one name: a factor, zeros, a rounding, an update of low rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from trainprobe.ckpt_compare.cause import MOST, Cause, Mismatch, Values, comparable, count, dense, listed
from trainprobe.ckpt_compare.masters import rounded
from trainprobe.ckpt_compare.pieces import LogicalTensor
from trainprobe.engine.compare.number_formats import decode, number_format
from trainprobe.engine.compare.rounding import noise_floor

LAYER = re.compile(r"(?<![A-Za-z_])(?:layers?|blocks?|h)\.(\d+)\.")
LARGEST_RANK = 64  # of an update that is looked for
LEAST_WIDTH = 16  # of a matrix of which a low rank says something: one step of a tiny layer has a low rank too


def factors(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find tensors that are a multiple of those of the other side: the same factor, rounded to three digits."""
    by_factor: dict[str, set[str]] = {}
    for o in mismatches:
        d = o.difference
        if min(d.square_a, d.square_b) > 0 and d.count > 1 and not (d.misplaced or d.nan_a or d.nan_b):
            factor = d.dot / d.square_a
            left = d.square_b - factor * d.dot  # what B has beside factor × A
            if abs(factor - 1) > 0.01 and left <= 1e-4 * d.square_b and abs(factor) > 1e-12:
                by_factor.setdefault(f"{factor:.3g}", set()).add(o.key)
    for factor, keys in by_factor.items():
        if len(keys) > 1 or len(mismatches) == 1:
            yield Cause(f"{count(keys)} {factor} times as large in B as in A", frozenset(keys))


def centred_norms(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find norms whose weights are one apart: zero-centred in one checkpoint and not in the other."""
    apart = {o.key: _one_apart(o) for o in mismatches if len(o.a.shape) == 1 and "norm" in o.key.lower()}
    for side in ("A", "B"):
        keys = {key for key, lower in apart.items() if lower == side}
        if keys:
            yield Cause(f"{count(keys)} zero-centred in {side}: one less than in the other", frozenset(keys))


def _one_apart(o: Mismatch) -> str:
    """Return the side whose values are all one less than those of the other; nothing where that is not so."""
    d = o.difference
    if d.misplaced or not d.count or abs(d.max_abs - 1) > 0.02 or abs(d.square_d / d.count - 1) > 0.02:
        return ""
    a, b = dense(o.a), dense(o.b)
    if a is None or b is None or a.shape != b.shape:
        return ""
    return "A" if np.all(b > a) else "B" if np.all(a > b) else ""


def masters(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find masters of one side that are 16-bit numbers: taken from the weights, and not from the optimizer."""
    masters = [o for o in mismatches if o.a.slot == "master"]
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


def zeros(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find tensors that are all zeros on one side only: moments of an optimizer that was made anew, an untrained adapter."""
    for side in ("A", "B"):
        found = [o for o in mismatches if _zero_side(o) == side]
        if found:
            slots = Counter(o.a.slot for o in found)
            kinds = " and ".join(f"{n} {slot or 'weight'}" for slot, n in slots.items())
            one = f"{found[0].key} is all zeros in {side}"
            many = f"{kinds} tensors are all zeros in {side}, such as {found[0].key}"
            yield Cause(one if len(found) == 1 else many, frozenset(o.key for o in found))


def _zero_side(o: Mismatch) -> str:
    d = o.difference
    if (d.square_a == 0.0) == (d.square_b == 0.0) or d.nan_a or d.nan_b:
        return ""
    return "A" if d.square_a == 0.0 else "B"


def exchanged_moments(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find parameters whose exp_avg and exp_avg_sq hold each other's values."""
    by_key = {o.key: o for o in mismatches}
    keys: set[str] = set()
    for o in mismatches:
        other = by_key.get(f"{o.a.name}#exp_avg_sq") if o.a.slot == "exp_avg" else None
        if other is not None and _equal(o.a, other.b) and _equal(other.a, o.b):
            keys |= {o.key, other.key}
    if keys:
        yield Cause(f"exp_avg and exp_avg_sq are exchanged in {len(keys) // 2} parameters", frozenset(keys))


def _equal(a: LogicalTensor, b: LogicalTensor) -> bool:
    sides = comparable(a, b)
    return sides is not None and np.array_equal(*sides)


def roundings(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find tensors that one side holds rounded to a 16-bit format, though it stores them in a finer one."""
    for side in ("A", "B"):
        for name in ("bfloat16", "float16"):
            found = list(_of_kinds(mismatches, lambda o, s=side, n=name: _is_rounded(o, s, n)))
            if found:
                finer = (found[0].a if side == "A" else found[0].b).format.name
                text = f"{count(o.key for o in found)} rounded to {name} in {side} (stored as {finer})"
                yield Cause(text, frozenset(o.key for o in found))


def _of_kinds(mismatches: Iterable[Mismatch], fits: Callable[[Mismatch], bool]) -> Iterator[Mismatch]:
    """Yield the tensors that fit; kinds of which the first one does not, and tensors behind the first `MOST`, are left out."""
    seen: Counter[str] = Counter()
    apart: set[str] = set()
    for o in mismatches:
        kind = re.sub(r"\d+", "*", o.key)
        seen[kind] += 1
        if kind in apart or seen[kind] > MOST:
            continue
        if fits(o):
            yield o
        elif seen[kind] == 1:
            apart.add(kind)


def _is_rounded(o: Mismatch, side: str, name: str) -> bool:
    exact, other = (o.b, o.a) if side == "A" else (o.a, o.b)
    if exact.format.name != "float32" or other.format.name == name or o.difference.misplaced or exact.shape != other.shape:
        return False
    x, y = dense(exact), dense(other)
    if x is None or y is None:
        return False
    near = _round(x, name)
    return np.array_equal(_round(near, other.format.name), y) and not np.array_equal(near, x)


def _round(values: Values, name: str) -> Values:
    """Return values rounded to a number format, float64; those of a format that is not among the known floats are kept."""
    if name not in ("float32", "float16", "bfloat16"):
        return values
    with np.errstate(over="ignore"):
        fmt = number_format(name)
        return decode(rounded(values.astype(np.float32), number_format("float32"), fmt), fmt).astype(np.float64)


def updates(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find matrices that differ by a matrix of low rank, the same in all of them: an adapter that was merged."""
    ranks: dict[str, int] = {}

    def fits(o: Mismatch) -> bool:
        rank = update_rank(o)
        ranks.update({o.key: rank} if rank else {})
        return rank > 0

    for _ in _of_kinds(mismatches, fits):
        pass
    for rank in sorted(set(ranks.values())):
        keys = [key for key, r in ranks.items() if r == rank]
        verb = "differs" if len(keys) == 1 else "differ"
        names = keys[0] if len(keys) == 1 else f"{len(keys)} matrices, such as {keys[0]},"
        yield Cause(f"{names} {verb} by a matrix of rank {rank}, as a merged adapter (LoRA) leaves", frozenset(keys))


def update_rank(o: Mismatch) -> int:
    """Return the rank of B - A where it is low and nearly all elements differ; 0 where it is not."""
    shape = o.a.shape
    if len(shape) != 2 or min(shape) < LEAST_WIDTH or o.b.shape != shape or 2 * o.difference.changed < o.difference.count:
        return 0
    sides = comparable(o.a, o.b)
    if sides is None or not (np.isfinite(sides[0]).all() and np.isfinite(sides[1]).all()):
        return 0
    x, y = sides
    apart = y - x
    if 2 * np.count_nonzero(apart) < apart.size:
        return 0  # a few elements or rows
    total = float(np.vdot(apart, apart))
    floor = max(2 * noise_floor(o.a.format, o.b.format), 1e-6)
    allowed = max(1e-4 * total**0.5, floor * float(np.linalg.norm(y)))
    most = min(LARGEST_RANK, min(shape) // 5)
    if total**0.5 < 4 * allowed:
        return 0
    sketch = apart @ np.random.default_rng(0).standard_normal((shape[1], most + 8))
    basis = np.linalg.qr(sketch)[0]
    left = total - np.cumsum(np.linalg.svd(basis.T @ apart, compute_uv=False) ** 2)
    fits = np.flatnonzero(left[:most] <= allowed**2)
    return int(fits[0]) + 1 if len(fits) else 0


def layers_alone(mismatches: Sequence[Mismatch], every: Collection[str]) -> Iterator[Cause]:
    """Find layers of which most tensors differ while no other tensor does: they were not loaded, or come from elsewhere."""
    places = [LAYER.search(o.key) for o in mismatches]
    stems = {m.string[: m.start()] for m in places if m}
    if len(mismatches) < 2 or None in places or len(stems) != 1:
        return
    stem = stems.pop()
    numbers = {int(m[1]) for m in places if m}
    held = [(key, int(m[1])) for key in every if (m := LAYER.search(key)) and key[: m.start()] == stem]
    inside = [key for key, number in held if number in numbers]
    if 2 * len(numbers) > len({number for _, number in held}) or 2 * len(mismatches) < len(inside):
        return
    which = f"layer {min(numbers)}" if len(numbers) == 1 else f"layers {listed(sorted(numbers))}"
    where = f" of {stem.rstrip('.')}" if stem else ""
    verb, its = ("differs", "its") if len(numbers) == 1 else ("differ", "their")
    text = f"only {which}{where} {verb} ({len(mismatches)} of {its} {len(inside)} tensors)"
    yield Cause(text, frozenset(o.key for o in mismatches))
