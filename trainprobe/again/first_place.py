"""Where two runs of one step first differ: the innermost call that was given the same and made something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import eq
from typing import Any

from trainprobe.again.recording import Key, Run, Shown


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two runs differ.

    slot: which of the call's values. given_same: the call was given the same bits in both runs, so that it is the cause.
    total: at how many values the runs differ, of `compared`.
    """

    key: Key
    slot: str
    given_same: bool
    total: int
    compared: int


Same = Callable[[Any, Any], bool]


def first_difference(a: Run, b: Run, same: Same = eq) -> Difference | None:
    """Return the first place where b differs from a, in the order in which a ran; None where no value that both have differs.

    same: tells of what a and b show of one value whether it is the same; by default of fingerprints.
    """
    total = compared = 0
    differing: list[tuple[Shown, list[str], list[str]]] = []  # with the slots that it was given, and made, otherwise
    for key, shown in a.items():
        other = b.get(key)
        if other is None:
            continue
        given, made = list(_other(shown.given, other.given, same)), list(_other(shown.made, other.made, same))
        compared += len(shown.given) + len(shown.made)
        total += len(given) + len(made)
        if given or made:
            differing.append((shown, given, made))
    if not differing:
        return None
    shown, slot, cause = _first(differing)
    return Difference(shown.key, slot, cause, total, compared)


def missing(a: Run, b: Run) -> Key | None:
    """Return the first call of a module that only one of two runs has, None where both made the same calls."""
    odd = {key for key in a.keys() ^ b.keys() if key.kind == "module" and key.phase == "forward"}
    return next((key for key in (*a, *b) if key in odd), None)


def _first(differing: list[tuple[Shown, list[str], list[str]]]) -> tuple[Shown, str, bool]:
    causes = [(shown, made[0]) for shown, given, made in differing if made and not given]
    forward = [(shown, slot) for shown, slot in causes if shown.key.phase != "backward"]
    if forward:
        at, slot = forward[0]
        while inner := next(((s, made) for s, made in forward if s.parent == at.key), None):
            at, slot = inner
        changed = next(((shown, given[0]) for shown, given, _ in differing if given and shown.parent == at.key), None)
        return (*(changed or (at, slot)), True)  # changed: in memory, between the calls inside a module
    first, given, made = differing[0]
    if first.key.phase == "forward":
        return first, (given or made)[0], False
    for kind in ("op", "module"):
        found = [(shown, slot) for shown, slot in causes if shown.key.kind == kind]
        if found:
            at, slot = found[0] if kind == "op" else max(found, key=lambda one: one[0].key.name.count("."))
            return at, slot, True
    return first, (given or made)[0], first.key.kind == "parameter"


def _other(a: dict[str, Any], b: dict[str, Any], same: Same) -> Iterable[str]:
    return (slot for slot, shown in a.items() if slot in b and not same(shown, b[slot]))
