"""Says in one clause how two sequences of batches differ: order, shift, other batching, replaced samples, other data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainprobe.config_check.compare.entries import STATISTICS, Batch, batch_key, same_tensor
from trainprobe.config_check.pack import BESIDE
from trainprobe.engine.core.words import counted


def explain(a: Sequence[Batch], b: Sequence[Batch], first: int) -> str:
    """Say in one clause how two sequences of batches differ. first: the first micro-step that does."""
    since = "" if first == 0 else f" from micro-step {first} on"
    left, right = [batch_key(x) for x in a], [batch_key(x) for x in b]
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
    if typed := _type_story(a[first], b[first], names):
        return f"{typed}{since}"
    if padding := _padding_story(a, b, first):
        return f"{padding}{since}"
    return _of_tensors(a, b, first, names, since) or _of_whole_batches(a, b, first, since)


def _of_tensors(a: Sequence[Batch], b: Sequence[Batch], first: int, names: Sequence[str], since: str) -> str:
    """Say how samples, or some of the tensors, differ; empty where whole batches do. since: from which micro-step on."""
    story = _sample_story(a, b, "samples") or _sample_story(a, b, "unpadded")
    if names and (not story or story[0].isdigit()) and all(_is_moved(x, y) for x, y in zip(a, b, strict=False)):
        verb = "holds" if len(names) == 1 else "hold"
        return f"{' and '.join(names)} {verb} the same values in other places{since}: padded on the other side, or permuted"
    if story:
        return f"{story}{since}"
    if names and a[first] and len(names) < len(a[first]):
        verb = "differs" if len(names) == 1 else "differ"
        return f"{' and '.join(names)} {verb} from micro-step {first} on, the rest of the batch is equal"
    return ""


def _of_whole_batches(a: Sequence[Batch], b: Sequence[Batch], first: int, since: str) -> str:
    which = "the first batch" if first == 0 else f"the data{since}"
    left, right = [batch_key(x) for x in a], [batch_key(x) for x in b]
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
    """Return the tensors that differ: those that the model is called with before those beside them (labels)."""
    names = [n for n in a[first].keys() & b[first].keys() if not same_tensor(a[first][n], b[first][n])]
    return sorted(names, key=lambda n: (BESIDE in a[first][n], n))


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


def _padding_story(a: Sequence[Batch], b: Sequence[Batch], first: int) -> str:
    """Say that only the padding differs, where each sample stands in its place without it."""
    left, right = (_rows_of(side, "unpadded") for side in (a, b))
    padded = [n for n in a[first] if n in b[first] and all("unpadded" in side[first][n] for side in (a, b))]
    names = _differing_names(a, b, first)
    others = [n for n in names if n not in padded and a[first][n].get("shape") == b[first][n].get("shape")]
    if not left or left != right or others or not names:
        return ""
    shapes = [{n: side[first][n].get("shape") for n in names} for side in (a, b)]
    if shapes[0] != shapes[1]:
        return f"the same samples are padded to another length: {_shapes(shapes[0])} and {_shapes(shapes[1])}"
    return f"the same samples are padded with another value in {' and '.join(names)}"


def _is_moved(a: Batch, b: Batch) -> bool:
    """Tell whether two batches hold equal values in tensors of equal shape, though not in the same places."""
    same_names = bool(a) and a.keys() == b.keys()
    return same_names and all(
        same_tensor(a[n], b[n])
        or (_form(a[n]) == _form(b[n]) and all(s in a[n] and a[n][s] == b[n].get(s) for s in STATISTICS))
        for n in a
    )


def _form(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry.get("shape"), entry.get("dtype")


def _type_story(a: Batch, b: Batch, names: Sequence[str]) -> str:
    """Say that tensors are of another type, where that is all that differs in their form."""
    types = [(a[n].get("dtype"), b[n].get("dtype")) for n in names]
    if (
        not types
        or any(x == y or None in (x, y) for x, y in types)
        or any(a[n].get("shape") != b[n].get("shape") for n in names)
    ):
        return ""
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} of another type: {types[0][0]} and {types[0][1]}"


def samples(batches: Sequence[Batch], column: str = "samples") -> Counter[Any]:
    """Count samples; a sample is what all tensors of its batch hold at its index. column: `unpadded` leaves padding out."""
    return Counter(_rows_of(batches, column))


def _rows_of(batches: Sequence[Batch], column: str = "samples") -> list[tuple[Any, ...]]:
    """Return the samples of all batches in order."""
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        columns = [e[column] for e in batch.values() if column in e]
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


def _sample_story(a: Sequence[Batch], b: Sequence[Batch], column: str) -> str:
    left, right = samples(a, column), samples(b, column)
    if not left or not right:
        return ""
    shared = (left & right).total()
    sizes = [[next(iter(x.values()), {}).get("shape", [0])[:1] for x in side] for side in (a, b)]
    if left == right and sizes[0] == sizes[1]:  # in the same order, it is another tensor, of fewer rows, that differs
        return "the same samples come in another order" if _rows_of(a, column) != _rows_of(b, column) else ""
    if shared == min(left.total(), right.total()):
        return "the same samples are cut into batches of another size"
    in_place = sum(x == y for x, y in zip(_rows_of(a, column), _rows_of(b, column), strict=False))
    if shared > in_place and shared >= max(2, max(left.total(), right.total()) // 4):
        return f"{shared} of {left.total()} samples are shared, in another order"
    return ""
