"""Find tensors again by their content when their names do not lead to each other: moved layers, other names, transposes.

A tensor is recognised by a sample: the values at up to 512 places spread over it in a fixed pattern. Samples that agree within
the rounding of the coarser format make two tensors candidates, and only then are all elements measured. It works across number
formats and layouts, and reads a few pages of each file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.coverage import coverage_of, overlaps
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor
from trainprobe.ckpt_compare.tasks import chunks, release, run, tasks_of
from trainprobe.ckpt_compare.transforms import turn
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.number_formats import NumberFormat, decode
from trainprobe.engine.compare.rounding import agreement_of, noise_floor
from trainprobe.errors import FormatError

SAMPLES = 512
MOST = 4000  # unmatched tensors on a side above which content is not searched
MINDSPORE = {
    "gamma": "weight", "beta": "bias", "embedding_table": "weight",
    "moving_mean": "running_mean", "moving_variance": "running_var",
}  # fmt: skip
_LAYER = re.compile(r"(?<![A-Za-z_])(\d+)(?=\.)")
Sample = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Tensors of one shape and slot: their keys and samples [tensors, places]."""

    keys: list[str]
    samples: npt.NDArray[np.float64]
    format: NumberFormat


@dataclass(frozen=True, slots=True)
class Move:
    """`b_key` on side B holds what `a_key` holds on side A; `turned` when its axes are swapped."""

    a_key: str
    b_key: str
    turned: bool = False
    difference: Difference = field(default_factory=Difference)


def align(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint, list[str]]:
    """Give both sides the same names where a framework or a wrapper names them otherwise; return notes that say so."""
    a, of_a = _as_torch(a, b, "A")
    b, of_b = _as_torch(b, a, "B")
    a, b, said = _without_wrapper(a, b)
    return a, b, [note for note in (of_a, of_b, said) if note]


def _as_torch(c: Checkpoint, other: Checkpoint, side: str) -> tuple[Checkpoint, str]:
    """Return the checkpoint with PyTorch's names of MindSpore's parameters, where the other side has those."""
    names: dict[str, str] = {}
    for t in c.tensors.values():
        stem, dot, last = t.name.rpartition(".")
        name = f"{stem}{dot}{MINDSPORE.get(last, last)}"
        held = other.tensors.get(name)
        if name != t.name and t.name not in other.tensors and name not in c.tensors and held and held.shape == t.shape:
            names[t.name] = name
    if not names:
        return c, ""
    renamed = (t.renamed(names.get(t.name, t.name)) if t.name in names else t for t in c.tensors.values())
    said = sorted({f"{old.rpartition('.')[2]} is {new.rpartition('.')[2]}" for old, new in names.items()})
    return replace(c, tensors={t.key: t for t in renamed}), f"{side} has MindSpore's names: {', '.join(said)}"


def _without_wrapper(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint, str]:
    """Drop a wrapper's prefix (`net.`, `model.`) from the side that has it, where more names then agree; say so in a note."""
    if all(t.slot or (k in b.tensors and b.tensors[k].shape == t.shape) for k, t in a.tensors.items()):
        return a, b, ""  # every name of A is one of B: no other way to name them agrees better
    left, right = ({(t.name, t.shape) for t in c.tensors.values() if not t.slot} for c in (a, b))
    best, agree = ("", ""), len(left & right)
    for pa, pb in [(p, "") for p in _prefixes(left)] + [("", p) for p in _prefixes(right)]:
        count = len({(n.removeprefix(pa), s) for n, s in left} & {(n.removeprefix(pb), s) for n, s in right})
        if count > agree:
            best, agree = (pa, pb), count
    if best == ("", ""):
        return a, b, ""
    prefix, side = best[0] or best[1], "A" if best[0] else "B"
    return _without(a, best[0]), _without(b, best[1]), f"names of {side} begin with {prefix}, which was left out"


def _prefixes(names: set[tuple[str, Any]]) -> list[str]:
    """Return the dotted beginnings that all names share, shortest first."""
    paths = [n.split(".")[:-1] for n, _ in names]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return [".".join(shared[: i + 1]) + "." for i in range(len(shared))]


def _without(c: Checkpoint, prefix: str) -> Checkpoint:
    if not prefix:
        return c
    renamed = [t.renamed(t.name.removeprefix(prefix)) for t in c.tensors.values()]
    return replace(c, tensors={t.key: t for t in renamed})


def explain_moves(
    unpaired: set[str], left: Mapping[str, LogicalTensor], right: Mapping[str, LogicalTensor]
) -> tuple[Move, ...]:
    """Search, among tensors that differ or have no partner, for pairs that hold the same under different keys."""
    a = {k: t for k, t in left.items() if k in unpaired}
    b = {k: t for k, t in right.items() if k in unpaired}
    if not a or not b or max(len(a), len(b)) > MOST:
        return ()
    shelves = _shelves(a)
    moves: list[Move] = []
    taken: set[str] = set()
    for key, tensor in b.items():
        for other, is_turned in _candidates(tensor, shelves):
            if (other == key and not is_turned) or other in taken:
                continue
            found = _same(a[other], turn(tensor) if is_turned else tensor)
            if found is not None:
                moves.append(Move(other, key, is_turned, found))
                taken.add(other)
                break
    return tuple(moves)


def find_copies(
    wrong: Mapping[str, Difference], left: Mapping[str, LogicalTensor], right: Mapping[str, LogicalTensor]
) -> tuple[tuple[Move, str], ...]:
    """Search for tensors that hold what another one holds on the other side, wherever that stands; with their side.

    wrong: differences of tensors that are not explained. One that is apart in a part of its elements is no copy.
    """
    keys = [k for k, d in wrong.items() if k in left and k in right and 2 * d.changed > d.count and len(left[k].shape) > 0]
    found: list[tuple[Move, str]] = []
    for side, mine, others in (("B", right, left), ("A", left, right)):
        shapes = {(mine[k].shape, mine[k].slot) for k in keys}
        same = {k: t for k, t in others.items() if (t.shape, t.slot) in shapes}
        shelves = _shelves(same) if keys and len(same) <= MOST else {}
        for key in [k for k in keys if k not in {held.b_key for held, _ in found}]:
            for other, is_turned in _candidates(mine[key], shelves):
                agree = None if is_turned or other == key else _same(others[other], mine[key])
                if agree is not None:
                    found.append((Move(other, key, difference=agree), side))
                    break
    return tuple(found)


def find_aliases(unpaired: Mapping[str, LogicalTensor], common: Mapping[str, LogicalTensor]) -> dict[str, str]:
    """Return, for tensors that only one checkpoint names, which of its common ones hold the same values.

    Both are mappings of the same checkpoint: a parameter that a model uses twice (a head that is the embedding) stands in some
    files under both names and in others under one.
    """
    if not unpaired or len(unpaired) > MOST:
        return {}
    shapes = {(t.shape, t.slot) for t in unpaired.values()}
    shelves = _shelves({k: t for k, t in common.items() if (t.shape, t.slot) in shapes})
    found: dict[str, str] = {}
    for key, tensor in unpaired.items():
        same = ((other, _same(common[other], tensor)) for other, turned in _candidates(tensor, shelves) if not turned)
        owner = next((other for other, d in same if d is not None and not d.changed), None)
        if owner is not None:
            found[key] = owner
    return found


def _shelves(tensors: Mapping[str, LogicalTensor]) -> dict[tuple[Any, ...], _Shelf]:
    """Sort tensors by shape and slot: only those on one shelf can hold the same."""
    found: dict[tuple[Any, ...], list[tuple[str, Sample, NumberFormat]]] = {}
    for key, tensor in tensors.items():
        taken = _sample_or_none(tensor)
        if taken is not None:
            found.setdefault((tensor.shape, tensor.slot), []).append((key, taken, tensor.format))
    return {k: _Shelf([e[0] for e in es], np.stack([e[1] for e in es]), es[0][2]) for k, es in found.items()}


def _candidates(tensor: LogicalTensor, shelves: Mapping[tuple[Any, ...], _Shelf]) -> Iterator[tuple[str, bool]]:
    for is_turned in (False, True):
        if is_turned and len(tensor.shape) < 2:
            return
        seen = turn(tensor) if is_turned else tensor
        shelf = shelves.get((seen.shape, seen.slot))
        mine = _sample_or_none(seen) if shelf is not None else None
        if shelf is None or mine is None or np.all(mine == mine[0]):
            continue  # a constant (a norm's ones, a zero bias) says nothing about where it belongs
        floor = 4 * noise_floor(shelf.format, seen.format)
        rows = np.arange(len(shelf.keys))
        for columns in (slice(0, 8), slice(None)):  # a few places rule out nearly all
            near = np.isclose(shelf.samples[rows, columns], mine[columns], rtol=floor, atol=0.0, equal_nan=True)
            rows = rows[near.all(axis=1)]
        yield from ((shelf.keys[row], is_turned) for row in rows)


def _same(a: LogicalTensor, b: LogicalTensor) -> Difference | None:
    """Return the difference of all elements if they agree within the rounding of the stored formats."""
    total = Difference()
    for outcome in run([t for o in overlaps(coverage_of(a).parts, coverage_of(b).parts) for t in tasks_of(0, o)]):
        if outcome.failure:
            return None
        total = total.merge(outcome.difference)
    agree = agreement_of(total, noise_floor(a.format, b.format)) != "differ"
    return total if agree and total.count == a.count else None


def hold_the_same(a: LogicalTensor, b: LogicalTensor) -> bool:
    """Whether two tensors of equal shape hold the same values within the rounding of their formats."""
    return a.shape == b.shape and bool(a.pieces) and bool(b.pieces) and _same(a, b) is not None


def _sample_or_none(tensor: LogicalTensor) -> Sample | None:
    try:
        return sample(tensor)
    except FormatError:
        return None


def sample(tensor: LogicalTensor) -> Sample | None:
    """Return the values at fixed places of a tensor, float64 [up to 512]; None when no piece holds one of the places."""
    if not tensor.count or not tensor.pieces:
        return None
    places = _places(tensor.shape)
    values = np.full(len(places), np.nan)
    missing = np.ones(len(places), bool)
    for part in coverage_of(tensor).parts:
        inside = np.all((places >= part.box.offset) & (places < part.box.end), axis=1) & missing
        if inside.any():
            for box in chunks(part.box, part.piece.source):
                here = inside & np.all((places >= box.offset) & (places < box.end), axis=1)
                if here.any():
                    bits = part.load(box)[tuple((places[here] - np.array(box.offset, dtype=np.int64)).T)]
                    values[here] = decode(np.atleast_1d(bits), part.piece.source.format).reshape(int(here.sum()), -1)[:, 0]
                    release(part.piece.source)  # the system maps the neighbours of a page: with 512 places, the whole file
            missing &= ~inside
    return None if missing.any() else values


def _places(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return up to 512 places spread over a tensor, [places, axes]; the same for every tensor of this shape."""
    count = math.prod(shape)
    wanted = min(SAMPLES, count)
    step = max(1, count // wanted)
    flat = np.arange(wanted) * step + np.arange(wanted) % step
    return np.stack(np.unravel_index(flat, shape), axis=1) if shape else np.empty((1, 0), np.int64)


def layer_sentences(moves: Iterable[Move]) -> list[str]:
    """Say moves in words, whole layers as one sentence each: `layers.2 of B holds layers.0 of A`."""
    layers: dict[tuple[str, str], int] = {}
    rest: list[str] = []
    for move in moves:
        x, y = _layer_of(move.a_key), _layer_of(move.b_key)
        if not move.turned and x and y and x[1] == y[1]:
            layers[y[0], x[0]] = layers.get((y[0], x[0]), 0) + 1
        else:
            rest.append(f"{move.b_key} of B holds {move.a_key} of A{', transposed' if move.turned else ''}")
    return [f"{b} of B holds {a} of A ({n} tensor{'s' if n > 1 else ''})" for (b, a), n in layers.items()] + rest


def _layer_of(key: str) -> tuple[str, str] | None:
    """Split `layers.3.mlp.fc2.weight` into `layers.3` and the rest."""
    match = _LAYER.search(key)
    return (key[: match.end()], key[: match.start()] + "*" + key[match.end() :]) if match else None
