"""The recomputed forward equals the first: activation checkpointing gives back what was thrown away.

Relation: the outputs of a module that runs again within the backward pass are those of one of its forwards in this step, bit
for bit. Where bits differ, norm and sum must agree within 1e-5 of the norm (1e-3 for 16-bit formats): some kernels add in
another order each time. Which modules run again is learned at the first step that is checked, so the second is the first that
is judged. Usually caused by random numbers that are not restored (`preserve_rng_state=False`), by a buffer or flag that the
first forward changed, or by a cast that is not in force in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"rerun"})
OBSERVERS = frozenset({"repeated_forwards"})
STAGE = "backward"
PYTORCH_ONLY = "recomputed cells are recorded by level L0, and not compared with the first forward"
_FLOOR, _FLOOR_SHORT = 1e-5, 1e-3


@dataclass(frozen=True, slots=True)
class ModuleOutput:
    """One tensor that a module handed on."""

    fingerprint: int
    """Of its bytes."""
    norm: float
    """Its norm."""
    total: float
    """The sum of its elements."""
    count: float
    """How many elements it has."""
    dtype: str
    """As the framework prints it."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A forward that ran again within the backward pass."""

    name: str
    """The module."""
    order: int
    """Where the module's first forward stands among those that were looked at."""
    again: tuple[ModuleOutput, ...]
    """Its outputs."""
    first: tuple[tuple[ModuleOutput, ...], ...]
    """The outputs of the module's forwards of this step."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Forwards that ran again."""

    recomputed: tuple[Repeat, ...] = ()
    """In their order."""


def check(evidence: Evidence) -> list[Finding]:
    """Find modules whose second forward is another one."""
    wrong = sorted((r for r in evidence.of(Repeats).recomputed if not _is_one_of(r)), key=lambda repeat: repeat.order)
    if not wrong:
        return []
    first = wrong[0]
    again, before = first.again[0].norm if first.again else float("nan"), [f[0].norm for f in first.first if f]
    names = list(dict.fromkeys(repeat.name for repeat in wrong))
    text = (
        f"the forward of {and_more(names)} that ran again in the backward pass is not the first one: norm {again:.9g} "
        f"instead of {before[0] if before else float('nan'):.9g}"
    )
    hint = "let the checkpoint restore the random state, and keep buffers and flags as they are in the first forward"
    return [
        evidence.found(
            text,
            first.name,
            "output",
            next=hint,
            measured=again,
            expected=before[0] if before else None,
            floor=_FLOOR,
            kind="module",
            severity="error",
            names=names,
        )
    ]


def _is_one_of(repeat: Repeat) -> bool:
    return any(
        len(first) == len(repeat.again) and all(_same(a, b) for a, b in zip(first, repeat.again, strict=True))
        for first in repeat.first
    )


def _same(a: ModuleOutput, b: ModuleOutput) -> bool:
    if a.fingerprint == b.fingerprint:
        return True
    floor = (_FLOOR if "32" in a.dtype or "64" in a.dtype else _FLOOR_SHORT) * a.norm
    return abs(a.norm - b.norm) <= floor and abs(a.total - b.total) <= floor * a.count**0.5
