"""Relations that hold in any correct training loop: each file here is one, and is found by its file name.

The module of a relation holds

    COST      what it needs: "host" (nothing is read), "fingerprints" (one pass over parameters, gradients and state), "ranks"
              (the step's small collective), "rerun" (something is run again)
    STAGE     where in a step a violation arises, see `STAGES`; findings of one step are reported in this order, causes first
    OBSERVERS the files of `monitor.audit.observers` whose facts it reads. A run has only the observers that a relation of its
              plan names. A relation of another package that names none gets all
    check     a pure function of the evidence of one rank: check(evidence) -> list[Finding]

and may hold

    remember  what `check` needs to know of this audited step at the next one: remember(evidence) -> Any. Both get it as
              `evidence.remembered(NAME, otherwise)`
    PYTORCH_ONLY  why MindSpore cannot judge it, if it cannot
    EVERY     its interval in steps, unless the plan gives one: 10, or 50 if something is run again
    shares    what this rank sends to the others when ranks are compared: shares(evidence) -> {key: (fingerprint, number)},
              with keys by `messages.key_of`. It arrives as `Peer.rows`

Other packages bring relations through the entry point group `trainprobe.relations`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from trainprobe.engine.core.records import Finding
from trainprobe.errors import PlanError, did_you_mean

STAGES = (
    "set-up",
    "state",
    "data",
    "forward",
    "backward",
    "reduction",
    "whole gradient",
    "clipping",
    "rate",
    "update",
    "moments",
    "evaluation",
)


class Relation(Protocol):
    """What the module of a relation holds."""

    COST: frozenset[str]
    OBSERVERS: frozenset[str]
    STAGE: str

    def check(self, evidence: Any) -> list[Finding]:
        """Return the violations that the evidence shows, gravest or earliest first."""
        ...


@cache
def relation_names() -> tuple[str, ...]:
    """Return the names of all relations, by the stage of a step that they are about."""
    here = {path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    names = here | {point.name for point in importlib.metadata.entry_points(group="trainprobe.relations")}
    return tuple(sorted(names, key=lambda name: (STAGES.index(_load(name).STAGE), name)))


def load_relation(name: str) -> Relation:
    """Return the module of a relation. Raises PlanError for a name that is none."""
    if name in relation_names():
        return _load(name)
    known = list(relation_names())
    raise PlanError(f"{name!r} is not a relation{did_you_mean(name, known)} (there are: {', '.join(known)})")


def observers_of(relations: Iterable[str]) -> frozenset[str] | None:
    """Return the observers that relations name; None, for all, where one names none."""
    named = [getattr(load_relation(name), "OBSERVERS", None) for name in relations]
    return None if None in named else frozenset(observer for observers in named for observer in observers or ())


def usual_interval(name: str) -> int:
    """Return at each how many steps a relation is checked unless the plan says otherwise."""
    relation = load_relation(name)
    return getattr(relation, "EVERY", 50 if "rerun" in relation.COST else 10)


@cache
def _load(name: str) -> Relation:
    if (Path(__file__).parent / f"{name}.py").exists():
        return importlib.import_module(f"{__name__}.{name}")  # pyright: ignore[reportReturnType]
    return next(iter(importlib.metadata.entry_points(group="trainprobe.relations", name=name))).load()
