"""What `dump-compare --json` writes, and its published schema (docs/dump_compare.schema.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from trainprobe.dump_compare.intervals import Evidence
from trainprobe.dump_compare.judge import Outcome
from trainprobe.engine.core.json_schema import schema_of, text_of

_CONFIG: dict[str, Any] = {"use_attribute_docstrings": True, "extra": "forbid"}


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """One tensor of a call."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    slot: str
    """Its place in the call: `input.0`, `kwargs.mask`, `parameters.weight`, `output`, `grad_input.0`, `weight`."""
    result: bool
    """Whether the call gives it, or is given it."""
    low: float | None
    """Lower end of the distance, the relative l2; null stands for infinity."""
    high: float | None
    """Upper end of the distance; null stands for infinity."""
    evidence: Evidence
    """What the distance is known by."""
    note: str
    """What else there is to say; empty where nothing is."""
    formats: str
    """Both number formats where they are two; else empty."""
    cancelled: float | None
    """Norm of the terms that were summed to get it, over its own norm; 1 where nothing cancels or it does not matter."""
    floor: float | None
    """What rounding does to it, as the run of --floor measured it; null where a model speaks."""
    from_truth: tuple[float | None, float | None] | None
    """Distances of A and of B from the run of --high-precision; null without one."""


@dataclass(frozen=True, slots=True)
class ComparedCall:
    """One call of one step and rank."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    step: int
    """Step, as A has it."""
    rank: int
    """Rank, as A has it."""
    a: str | None
    """Entry in A's dump; null where only B has the call."""
    b: str | None
    """Entry in B's dump; null where only A has the call."""
    paired_by: str
    """What makes the two partners: `name`, or what structure says (docs/dump_compare.md); empty where one is alone."""
    verdict: Outcome
    """What became of the call."""
    argument: str
    """A plain argument that is another on both sides; else empty."""
    given: float | None
    """Upper end of the distance of what the call is given; null stands for infinity."""
    own_rounding: float | None
    """What rounding alone may do to its results, by the model."""
    values: list[ComparedValue]
    """Its tensors."""


@dataclass(frozen=True, slots=True)
class DumpComparison:
    """What two dumps come to."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {**_CONFIG, "title": "Comparison"}

    code: int
    """Exit code: 0 identical, 1 within rounding, 2 they part, 3 not comparable or incomplete."""
    verdict: str
    """That in words."""
    details: list[str]
    """What else there is to say."""
    first: ComparedCall | None
    """The first place where the runs part; null where they do not."""
    calls: list[ComparedCall]
    """All calls, in order."""


def schema_text() -> str:
    """Return the JSON schema of what `--json` writes, as the text of a file."""
    return text_of(schema_of(DumpComparison))
