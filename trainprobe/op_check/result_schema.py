"""What `op-check --json` writes, and its published schema (docs/op_check.schema.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trainprobe.engine.core.json_schema import schema_of, text_of
from trainprobe.op_check.judge import Outcome

_CONFIG: dict[str, Any] = {"use_attribute_docstrings": True, "extra": "forbid"}
Number = float | Literal["nan", "inf", "-inf"]


@dataclass(frozen=True, slots=True)
class Result:
    """One result of one judged call, or what is to say of a call that could not be judged."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    step: int
    """Step of the dump."""
    rank: int
    """Rank of the dump."""
    entry: str
    """The call's name in the dump, with its direction."""
    operator: str
    """`Functional.linear`."""
    module: str
    """Path of the module that it ran in, or the stage outside of modules; empty where neither is known."""
    direction: Literal["forward", "backward"]
    """Which of the two was judged."""
    result: int
    """Number of the result."""
    verdict: Outcome
    """What became of it."""
    reason: str
    """Why, as the end of a sentence; empty where nothing is to be said."""
    bounds: Number
    """How many bounds the worst element is away."""
    at: list[int] | None
    """Place of the worst element."""
    got: Number | None
    """The number that was recorded there."""
    want: Number | None
    """The number that belongs there."""
    share: float
    """Share of the elements that are too far away; of exact operators, of those that differ."""
    gain: Number
    """Factor by which the whole result is too large, less one."""
    not_nearest: float
    """Share of the elements that are not the correctly rounded number."""
    one_sided: Number
    """How unevenly these lie above and below it, in standard deviations."""
    elements: int
    """How many elements the result has."""
    reference: str
    """What it was judged against: `formula`, `float64 kernel`, `properties`, or the operator run again; else empty."""
    note: str
    """What was assumed; empty where nothing was."""
    equal_calls: int
    """How many more calls had the same bits in and out."""


@dataclass(frozen=True, slots=True)
class ByStandard:
    """One result by a standard of mindstudio-probe."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    step: int
    """Step of the dump."""
    rank: int
    """Rank of the dump."""
    entry: str
    """The call's name in the dump, with its direction."""
    result: int | None
    """Number of the result; null where the call could not be measured."""
    standard: str
    """The standard that judged."""
    status: Literal["pass", "error", "SKIP"]
    """Its verdict."""
    reason: str
    """What is not met, or why there is no verdict."""
    metrics: dict[str, Number]
    """The numbers that are known of the result, by the names of trainprobe.op_check.standards.metrics."""
    second: dict[str, Number]
    """Those of the second result of the same inputs: of the other dump, or of this machine's operator."""


@dataclass(frozen=True, slots=True)
class Standard:
    """What `--standard` adds."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    name: str
    """The standard that was asked for, or `by-operator`."""
    results: list[ByStandard]
    """All results of the first dump."""


@dataclass(frozen=True, slots=True)
class Document:
    """What the dumps come to."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    code: int
    """Exit code: 0 all are right, 1 suspicious or in another mode, 2 a bug, 3 something was not checked."""
    verdict: str
    """That in words, or what a standard that was asked for says."""
    details: list[str]
    """What else there is to say."""
    results: list[Result]
    """All results, of both dumps where there are two."""
    standard: Standard | None
    """Results by a standard; null unless one was asked for."""


def schema_text() -> str:
    """Return the JSON schema of what `--json` writes, as the text of a file."""
    return text_of(schema_of(Document))
