"""What became of each weight that was sent: the verdict of one push, and of the pushes before it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.core.words import and_more, counted
from trainprobe.rollout.logprobs.tokens import ROUNDING
from trainprobe.rollout.weights.logical import HeldPiece
from trainprobe.rollout.weights.prints import Box, WeightPrint, prints_of_pieces, share_of_box

Prints = Mapping[str, WeightPrint]
_FLOATING = frozenset(ROUNDING) | {"float8_e4m3fn", "float8_e5m2"}
_OF_A_CAST = 16.0  # roundings of each element, at most, of two ways to one number
# cause → its weight in the order of the sentence: what explains others comes first
ORDER = (
    *("replicas disagree", "never travels", "adapter never travels", "exchanged", "stale", "never sent", "transposed"),
    *("half loaded", "one shard wrong", "permuted", "cast in another order", "other values", "not comparable"),
)


class Push(NamedTuple):
    """One push: its version, and what was sent."""

    version: int
    sent: Prints


@dataclass(frozen=True, slots=True)
class WeightFate:
    """One tensor that did not arrive as it was sent."""

    name: str
    cause: str
    """One of `ORDER`."""
    note: str
    """What is known of it, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class WeightArrival:
    """The verdict of one push; `fates` are the tensors that did not arrive, the gravest first."""

    verdict: Verdict
    fates: list[WeightFate]


def judge_arrival(pushes: Sequence[Push], engine: Sequence[HeldPiece], before: Prints | None = None) -> WeightArrival:
    """Judge what an engine holds after the last of some pushes. before: what it held at the push before, where known."""
    push = pushes[-1]
    given, pieces = _within_vocabulary(engine, push.sent), dict[str, list[HeldPiece]]()
    for piece in given:
        pieces.setdefault(piece.name, []).append(piece)
    held = prints_of_pieces(given)
    fates = [fate for name, sent in push.sent.items() if (fate := _fate(name, sent, pushes, pieces, held, before)) is not None]
    known = {each.fingerprint for each in push.sent.values()}
    lone = [name for name in held if name not in push.sent and held[name].fingerprint not in known]  # a tied copy is known
    unlike = [name for name in lone if before is not None and before.get(name) == held[name] and len(pushes) > 1]
    fates = _perhaps_fused(fates, push.sent, {name: held[name] for name in lone})
    fates += [WeightFate(name, "never sent", "the engine has it, and no push sends it") for name in unlike]
    fates.sort(key=lambda fate: ORDER.index(fate.cause))
    history = _history(pushes)
    return WeightArrival(_verdict(push, fates, history, lone if not unlike else []), fates)


def _within_vocabulary(engine: Sequence[HeldPiece], sent: Prints) -> list[HeldPiece]:
    """Cut rows off that only pad the vocabulary of an engine."""
    found: list[HeldPiece] = []
    for piece in engine:
        want = sent.get(piece.name)
        rows = want.shape[0] if want is not None and want.shape else 0
        if piece.vocabulary and rows and piece.shard.whole[0] > rows and piece.shard.shape == piece.shard.whole:
            shape = (rows, *piece.shard.whole[1:])
            shard = type(piece.shard)((0,) * len(shape), shape, shape)
            piece = piece._replace(tensor=piece.tensor.narrow(0, 0, rows), shard=shard)
        found.append(piece)
    return found


def _perhaps_fused(fates: Sequence[WeightFate], sent: Prints, lone: Prints) -> list[WeightFate]:
    """Let no tensor be missed where its layer has as many elements under names that no map knows."""
    missed = {fate.name: sent[fate.name] for fate in fates if fate.cause == "never travels"}
    sizes, others = _by_layer(missed), _by_layer(lone)
    note = "the engine holds as many elements in this layer under names that are not known: fused, say"
    return [
        WeightFate(fate.name, "not comparable", note) if fate.name in missed and sizes[at] == others[at] else fate
        for fate in fates
        for at in [_layer(fate.name)]
    ]


def _by_layer(prints: Prints) -> Counter[tuple[str, ...]]:
    sizes = Counter[tuple[str, ...]]()
    for name, each in prints.items():
        sizes[_layer(name)] += math.prod(each.shape)
    return sizes


def _layer(name: str) -> tuple[str, ...]:
    """Return the numbers in a name and its last word."""
    *path, last = name.split(".")
    return *(part for part in path if part.isdecimal()), last


def _joined(pieces: Sequence[HeldPiece]) -> Any:
    """Return the tensor that pieces make up."""
    if len(pieces) == 1:
        return pieces[0].tensor
    whole = pieces[0].tensor.new_empty(pieces[0].shard.whole)
    for piece in pieces:
        whole[tuple(slice(o, o + n) for o, n in zip(piece.shard.offset, piece.shard.shape, strict=True))] = piece.tensor
    return whole


def _fate(
    name: str,
    sent: WeightPrint,
    pushes: Sequence[Push],
    pieces: Mapping[str, Sequence[HeldPiece]],
    held: Prints,
    before: Prints | None,
) -> WeightFate | None:
    """Return what became of one tensor; None where it arrived."""
    if sent.disagree:
        return WeightFate(name, "replicas disagree", "ranks of the trainer hold other bits of the same piece")
    have = held.get(name)
    if have is None:
        return WeightFate(name, "never travels", "the engine holds no tensor of this name")
    for each, side in ((sent, "stamped: give gather="), (have, "seen in the engine")):
        if not each.complete:
            seen = sum(math.prod(shape) for _, shape in each.pieces)
            return WeightFate(name, "not comparable", f"{seen:,} of its {math.prod(each.shape):,} elements were {side}")
    if have.dtype != sent.dtype and not (have.dtype in _FLOATING and sent.dtype in _FLOATING and "8" not in have.dtype):
        return WeightFate(name, "not comparable", f"the engine holds it as {have.dtype}, which was made after loading")
    if have.fingerprint == sent.fingerprint and have.shape == sent.shape and have.dtype == sent.dtype:
        return None
    if have.dtype != sent.dtype:
        return WeightFate(name, "not comparable", f"sent as {sent.dtype}, held as {have.dtype}: give dtype={have.dtype!r}")
    tensor = _joined(pieces[name])
    if (turned := _transposed(tensor, sent)) is not None:
        return WeightFate(name, "transposed", turned)
    if have.shape != sent.shape:
        return WeightFate(name, "not comparable", f"repacked: sent as {list(sent.shape)}, held as {list(have.shape)}")
    fate = _known_bits(name, sent, pushes, have, before)
    return fate or _by_pieces(name, sent, pushes, tensor) or _by_sums(name, sent, have)


def _known_bits(
    name: str, sent: WeightPrint, pushes: Sequence[Push], have: WeightPrint, before: Prints | None
) -> WeightFate | None:
    """Say whose bits a tensor has, where they are known: of an earlier version, another tensor, the time before."""
    if sent.base is not None and have.fingerprint == sent.base:
        return WeightFate(name, "adapter never travels", "the engine holds the weight without its adapter")
    stale = next(
        (p.version for p in reversed(pushes[:-1]) if name in p.sent and p.sent[name].fingerprint == have.fingerprint), None
    )
    if stale is not None:
        return WeightFate(name, "stale", f"it is that of version {stale}")
    other = next((n for n, each in pushes[-1].sent.items() if each.fingerprint == have.fingerprint and n != name), None)
    if other is not None:
        return WeightFate(name, "exchanged", f"it holds the bits of {other}")
    if before is not None and name in before and before[name].fingerprint == have.fingerprint:
        return WeightFate(name, "never sent", "its bits are those before the push, and of no version that was pushed")
    return None


def _transposed(tensor: Any, sent: WeightPrint) -> str | None:
    if tensor.dim() < 2 or tuple(tensor.transpose(-1, -2).shape) != sent.shape:
        return None
    turned = tensor.transpose(-1, -2)
    whole = ((0,) * turned.dim(), tuple(turned.shape))
    alike = share_of_box(turned, whole, tuple(turned.shape)) == sent.fingerprint
    return "its last two axes are swapped" if alike else None


def _by_pieces(name: str, sent: WeightPrint, pushes: Sequence[Push], tensor: Any) -> WeightFate | None:
    """Say which pieces are wrong, where the sender has several and some are right."""
    if len(sent.pieces) < 2:
        return None
    wrong = [box for box, each in sent.pieces.items() if share_of_box(tensor, box, sent.shape) != each[0]]
    if not wrong or len(wrong) == len(sent.pieces):
        return None
    where = and_more([_named(box) for box in wrong])
    shares = {box: share_of_box(tensor, box, sent.shape) for box in wrong}
    for push in reversed(pushes[:-1]):
        old = push.sent.get(name)
        if old is not None and all(box in old.pieces and old.pieces[box][0] == shares[box] for box in wrong):
            return WeightFate(name, "half loaded", f"{where} are those of version {push.version}")
    return WeightFate(name, "one shard wrong", f"{where} are wrong, {counted(len(sent.pieces) - len(wrong), 'piece')} right")


def _named(box: Box) -> str:
    offset, shape = box
    axis = next((a for a in range(len(shape)) if offset[a]), 0)
    what = "rows" if axis == 0 else "columns"
    return f"{what} {offset[axis]}–{offset[axis] + shape[axis] - 1}" if shape else "it"


def _by_sums(name: str, sent: WeightPrint, have: WeightPrint) -> WeightFate:
    """Say whether the values are the same in another order, or rounded otherwise."""
    (signed, squares), (signed_here, squares_here) = sent.sums, have.sums
    unit, count = ROUNDING.get(sent.dtype, ROUNDING["bfloat16"]), max(1, math.prod(sent.shape))
    norm = math.sqrt(max(squares, 0.0))
    far = abs(signed - signed_here)
    if (
        far <= _OF_A_CAST * unit * norm
        and abs(squares - squares_here) <= _OF_A_CAST * unit * squares / math.sqrt(count) + 1e-6 * squares
    ):
        return WeightFate(
            name, "cast in another order", "it differs by roundings alone: it was cast, merged or added otherwise"
        )
    if abs(squares - squares_here) <= 3e-7 * squares and have.complete:
        return WeightFate(name, "permuted", "the same values stand in another order, as a kernel wants them")
    relative = abs(math.sqrt(max(squares_here, 0.0)) - norm) / norm if norm else math.inf
    return WeightFate(name, "other values", f"its norm differs by {relative:.1%} from what was sent")


def _history(pushes: Sequence[Push]) -> str | None:
    """Return what is wrong with the order of the pushes, as a sentence."""
    if len(pushes) < 2:
        return None
    last, earlier = pushes[-1], pushes[:-1]
    if last.version < earlier[-1].version:
        return f"Version {last.version} was pushed behind version {earlier[-1].version}: the engine goes back."
    same = next((p for p in reversed(earlier) if _bits(p) == _bits(last)), None)
    if same is not None and same.version != last.version:
        return f"Version {last.version} has the bits of version {same.version}: the optimizer moved nothing that was sent."
    return None


def _bits(push: Push) -> dict[str, int]:
    return {name: each.fingerprint for name, each in push.sent.items()}


_SAID = {
    "replicas disagree": "The trainer's ranks hold other bits of",
    "never travels": "Never travels:",
    "adapter never travels": "The adapter never travels:",
    "exchanged": "Exchanged:",
    "stale": "Stale:",
    "never sent": "Never sent:",
    "transposed": "Transposed:",
    "half loaded": "Half loaded:",
    "one shard wrong": "One shard is wrong:",
    "permuted": "Laid out otherwise:",
    "cast in another order": "Cast in another order:",
    "other values": "Other values:",
    "not comparable": "Not comparable:",
}
_ADVICE = {
    "stale": "Look at what the push leaves out, and at caches of the engine.",
    "never travels": "Send it, or keep it out of the policy.",
    "adapter never travels": "Merge the adapter before the push, or load it in the engine.",
    "cast in another order": "Cast and merge in one order on both sides.",
}


def _verdict(push: Push, fates: Sequence[WeightFate], history: str | None, lone: Sequence[str]) -> Verdict:
    wrong = [fate for fate in fates if fate.cause != "not comparable"]
    details = [f"{fate.name}: {fate.cause}, {fate.note}" for fate in fates]
    if lone:
        details.append(f"held by the engine alone, and not judged: {and_more(sorted(lone))}")
    if history is not None and not wrong:
        return Verdict(2, history, details)
    if wrong:
        first = wrong[0]
        alike = [fate.name for fate in wrong if fate.cause == first.cause]
        of_all = f"{len(wrong)} of {counted(len(push.sent), 'tensor')} of version {push.version} did not arrive as sent."
        names = and_more(alike, shown=2 if first.cause == "exchanged" else 1)
        return Verdict(2, " ".join(filter(None, (
            f"{_SAID[first.cause]} {names}: {first.note}.", of_all, history, _ADVICE.get(first.cause)))), details)  # fmt: skip
    if fates:
        first = fates[0]
        return Verdict(3, f"{counted(len(fates), 'tensor')} cannot be compared, such as {first.name}: {first.note}.", details)
    if not push.sent:
        return Verdict(3, "Nothing was sent: the trainer's model has no parameter.")
    return Verdict(0, f"All {counted(len(push.sent), 'tensor')} of version {push.version} arrived, bit for bit.", details)
