"""Which step, rank and call of one dump belongs to which of the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from trainprobe.dump_compare.op_names import mindspore_name, operator
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import slots
from trainprobe.engine.storage.dumps.layout import DUMP_FILE, LOG_FILE, find_dumps, has_run_log, holds_dump
from trainprobe.errors import CompareError, FormatError

Looks = Callable[[Call], Sequence[Hashable]]
_MOVES = frozenset(["reshape", "view", "transpose", "permute", "contiguous", "expand", "repeat", "flatten", "unflatten"])


@dataclass(frozen=True, slots=True)
class RankPair:
    """Two folders that are compared: `step` and `rank` as A has them."""

    step: int
    rank: int
    a: Path
    b: Path


class CallPair(NamedTuple):
    """A call and its partner; one of the two is None where there is none. place: order of execution."""

    place: int
    a: Call | None
    b: Call | None


def pair_ranks(a: Path, b: Path) -> tuple[list[RankPair], list[str]]:
    """Return the folders that belong together, in order, and a sentence for each step or rank that a side lacks.

    Two sides with one step each, or one rank each, are compared whatever the numbers are. Raises FormatError where a path holds
    no dump, CompareError where nothing belongs together.
    """
    sides = ranks_of(a), ranks_of(b)
    ranks = {rank for side in sides for of_step in side.values() for rank in of_step}
    ranks = ranks if min(map(len, sides)) > 1 else set[int]()  # what a user names by its step or rank may be any
    pairs: list[RankPair] = []
    missing: list[str] = []
    for step, of_step in _paired(*sides, "step", missing):
        here: list[str] = []
        pairs += [RankPair(step, rank, *folders) for rank, folders in _paired(*of_step, "rank", here)]
        here += [f"rank {rank} is in neither, and in another step" for rank in sorted(ranks - {*of_step[0], *of_step[1]})]
        missing += [f"step {step}: {sentence}" for sentence in here]
    if not pairs:
        raise CompareError(f"{a} and {b} have no step and rank in common: {'; '.join(missing)}")
    return pairs, missing


def pair_steps(
    a: dict[int, dict[int, Path]], b: dict[int, dict[int, Path]]
) -> tuple[list[tuple[int, dict[int, Path], dict[int, Path]]], list[str]]:
    """Return (step, ranks of A, ranks of B) of steps that belong together, and a sentence for each that only one side has."""
    missing: list[str] = []
    return [(step, *of_step) for step, of_step in _paired(a, b, "step", missing)], missing


def _paired(a: dict[int, Any], b: dict[int, Any], what: str, missing: list[str]) -> Iterator[tuple[int, tuple[Any, Any]]]:
    if len(a) == len(b) == 1:
        yield next(iter(a)), (*a.values(), *b.values())
        return
    for number in sorted(a.keys() | b.keys()):
        if number in a and number in b:
            yield number, (a[number], b[number])
        else:
            missing.append(f"{what} {number} is in {'A' if number in a else 'B'} alone")


def find_rank(path: Path, step: int, rank: int) -> Path | None:
    """Return the folder of a step and rank of the dump at `path`, or the only one whatever its numbers are; None for neither.

    Raises FormatError where the path holds no dump.
    """
    found: Any = ranks_of(path)
    for number in (step, rank):
        found = found.get(number) if len(found) > 1 else next(iter(found.values()))
        if found is None:
            return None
    return found


def ranks_of(path: Path) -> dict[int, dict[int, Path]]:
    """Return step → rank → folder of what a user names: a dump's root, a step, a rank, or its file."""
    if path.is_file() and path.suffix != ".json":
        raise FormatError(
            f"no dump at {path}: it is a file; name the folder of a dump, of a step or of a rank, or a {DUMP_FILE}"
        )
    found = find_dumps(path)
    folders = [folder for ranks in found.values() for folder in ranks.values()]
    if not any(map(holds_dump, folders)):
        root = path.parent if path.is_file() else path
        raise FormatError(f"no dump at {path}: {_lacking(root, [root, *folders])}")
    return found


def _lacking(path: Path, folders: Sequence[Path]) -> str:
    """Say what stands where a dump was looked for."""
    if not path.exists():
        return "there is no such file or folder"
    log = next((folder for folder in folders if (folder / LOG_FILE).is_file() or has_run_log(folder)), None)
    if log is not None:
        return f"{log} holds a run log, which `trainprobe judge` reads; record with `sinks: [dump]` to compare"
    return f"expected step folders (step0, …), rank folders (rank0, …) or a {DUMP_FILE} there"


def pair_calls(
    a: Sequence[Call],
    b: Sequence[Call],
    rename: Callable[[str], str] = str,
    looked_through: tuple[Set[str], Set[str]] = (frozenset(), frozenset()),
    looks: tuple[Looks, Looks] | None = None,
) -> list[CallPair]:
    """Return all calls of both sides, each with its partner, in the order of A; what only B has follows its neighbour.

    Modules, parameters and saved values belong together by name, number, phase and micro-batch. Ops are numbered as they run,
    so that one more of them shifts all numbers behind it: their forwards are aligned as sequences of names, and a backward
    belongs to that of its forward's partner.
    rename: is given each name of A. looked_through: modules of each side that are left out; what runs within them, runs within
    what is around them. looks: of A and of B, what makes two ops of one name and shapes partners before others are, the
    surest last, as one framework may calculate by several of them what is one op of the other.
    """
    if any(looked_through):
        a, b = (
            [call for call in side if call.kind not in ("module", "parameter") or call.name not in names]
            for side, names in zip((a, b), looked_through, strict=True)
        )
    named = {_key(call): call for call in b if call.kind != "op"}
    partner = {i: named[key] for i, call in enumerate(a) if call.kind != "op" and (key := _key(call, rename)) in named}
    partner |= _pair_ops(a, b, rename, looked_through, looks)
    whole = all(any(call.name == ROOT for call in side) for side in (a, b))  # other tools leave the model itself out
    place_in_b = {id(call): j for j, call in enumerate(b)}
    place_of = {place_in_b[id(call)]: i for i, call in partner.items()}
    found: list[tuple[int, int, Call | None, Call | None]] = [
        (i, 0, call, partner.get(i)) for i, call in enumerate(a) if i in partner or whole or call.name != ROOT
    ]
    before = 0
    for j, call in enumerate(b):
        before = place_of.get(j, before)
        if j not in place_of and (whole or call.name != ROOT):
            found.append((before, 1, None, call))
    return [CallPair(i, mine, theirs) for i, (_, _, mine, theirs) in enumerate(sorted(found, key=lambda pair: pair[:2]))]


def _key(call: Call, rename: Callable[[str], str] = str) -> Hashable:
    return call.kind, rename(call.name), call.call, call.phase, call.micro or 0


def _pair_ops(
    a: Sequence[Call],
    b: Sequence[Call],
    rename: Callable[[str], str],
    looked_through: tuple[Set[str], Set[str]],
    looks: tuple[Looks, Looks] | None,
) -> dict[int, Call]:
    """Return place in A of each op → its partner."""
    mine, theirs = ([i for i, call in enumerate(side) if call.kind == "op" and call.phase != "backward"] for side in (a, b))
    of_mindspore = any(side[i].name.startswith("Primitive.") for side, ops in ((a, mine), (b, theirs)) for i in ops)
    plain = mindspore_name if of_mindspore else operator
    keys = (
        _op_keys([a[i] for i in mine], looked_through[0], plain, rename),
        _op_keys([b[j] for j in theirs], looked_through[1], plain),
    )
    aligned = [(mine[i], theirs[j]) for i, j in _aligned_by_shapes([a[i] for i in mine], [b[j] for j in theirs], *keys, looks)]
    partner = {i: b[j] for i, j in aligned}
    if not any(call.kind == "op" and call.phase == "backward" for call in a):
        return partner
    number = {(a[i].name, a[i].call): (b[j].name, b[j].call) for i, j in aligned}
    forwards = [{(side[i].name, side[i].call) for i in of_side} for side, of_side in ((a, mine), (b, theirs))]
    backward = {(call.name, call.call): call for call in b if call.kind == "op" and call.phase == "backward"}
    for i, call in enumerate(a):
        if call.kind == "op" and call.phase == "backward":
            key = call.name, call.call
            of_partner = number.get(key) if key in forwards[0] else key if key not in forwards[1] else None
            if of_partner in backward:
                partner[i] = backward[of_partner]
    return partner


def _op_keys(
    ops: Sequence[Call], looked_through: Set[str], plain: Callable[[str], str], rename: Callable[[str], str] = str
) -> list[Hashable]:
    """Return what must be equal of two ops that belong together. plain: is given the name of each."""
    within: dict[int, str | None] = {}  # by the call that an op runs in
    names: dict[str, tuple[str, bool]] = {}  # of an op → its plain name, and whether it only moves data
    keys: list[Hashable] = []
    for op in ops:
        around = id(op.parent)
        if around not in within:
            within[around] = _module_around(op, looked_through, rename)
        if op.name not in names:
            name = plain(op.name)
            names[op.name] = name, name.rpartition(".")[2] in _MOVES
        name, moves = names[op.name]
        keys.append((name, op.phase, within[around], _first_shape(op) if moves else None))
    return keys


def _module_around(op: Call, looked_through: Set[str], rename: Callable[[str], str]) -> str | None:
    """Return the name in B of the module that an op runs in, None outside of all and in the model itself."""
    parent = op.parent
    while isinstance(parent, Call) and parent.kind == "module" and parent.name in looked_through:
        parent = parent.parent
    name = rename(parent.name) if isinstance(parent, Call) and parent.kind == "module" else None
    return None if name == ROOT else name


def _first_shape(call: Call) -> Hashable:
    """Return the shape of what an op is given first: one that only moves data belongs to none that is given another shape."""
    return next((tuple(value.shape) for _, value in slots(call)), None)


def _aligned_by_shapes(
    a: Sequence[Call],
    b: Sequence[Call],
    names_a: Sequence[Hashable],
    names_b: Sequence[Hashable],
    looks: tuple[Looks, Looks] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield pairs of places of equal names, in order. Where the names part, ops of equal shapes too belong together first.

    So an op that one side runs more often, a reshape in attention that is not fused, finds no partner of another shape while
    there is one of its own. looks: those that look alike too come even before, the more so the later what they return.
    """
    if names_a == names_b:
        yield from ((i, i) for i in range(len(names_a)))
        return
    keys: list[tuple[Sequence[Hashable], Sequence[Hashable]]] = [(names_a, names_b)]
    keys.append(([*zip(names_a, map(_shapes, a), strict=True)], [*zip(names_b, map(_shapes, b), strict=True)]))
    if looks is not None:
        seen = [[*zip(*map(look, ops), strict=True)] for look, ops in zip(looks, (a, b), strict=True)]
        levels = zip(*seen, strict=False)
        keys += [([*zip(keys[1][0], x, strict=True)], [*zip(keys[1][1], y, strict=True)]) for x, y in levels]
    yield from _aligned_by(keys, (0, len(a)), (0, len(b)))


def _aligned_by(
    keys: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]], in_a: tuple[int, int], in_b: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of places of equal keys within a part of each side: by the last keys, and between these by those before."""
    *others, (a, b) = keys
    before = in_a[0], in_b[0]
    sure = [(in_a[0] + i, in_b[0] + j) for i, j in aligned(a[slice(*in_a)], b[slice(*in_b)])]
    for i, j in [*sure, (in_a[1], in_b[1])]:
        if others:
            yield from _aligned_by(others, (before[0], i), (before[1], j))
        if i < in_a[1]:
            yield i, j
        before = i + 1, j + 1


def _shapes(call: Call) -> Hashable:
    return tuple([tuple(value.shape) for _, value in slots(call)])


def aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield pairs of places of equal keys, in order. The matcher, quadratic at worst, sees what is between equal ends only."""
    least = min(len(a), len(b))
    head = next((i for i in range(least) if a[i] != b[i]), least)
    tail = next((i for i in range(least - head) if a[-1 - i] != b[-1 - i]), least - head)
    yield from ((i, i) for i in range(head))
    matcher = SequenceMatcher(None, a[head : len(a) - tail], b[head : len(b) - tail], autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from ((head + block.a + k, head + block.b + k) for k in range(block.size))
    yield from ((len(a) - tail + k, len(b) - tail + k) for k in range(tail))
