"""What the fields of a plan may hold: levels, sizes in bytes, patterns of names, parts of tensors, the bins of a histogram."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict

from trainprobe.engine.core.row_schema import StatisticName
from trainprobe.engine.plan.detail import Slice, Summary
from trainprobe.engine.plan.selection import parse_names, parse_steps

Level: TypeAlias = Literal["off", "L0", "L1", "mix", "debug"]
Record: TypeAlias = Literal["nothing", "L0", "L1", "mix", "debug"]
Task: TypeAlias = Literal["statistics", "tensor"]
PlanPhase: TypeAlias = Literal["forward", "backward", "optimizer"]
Data: TypeAlias = Literal["input", "output", "kwargs", "parameters", "parameter_gradients"]
Side: TypeAlias = Literal["input", "output"]
SubPlan: TypeAlias = dict[str, Any] | Annotated[bool, Strict()] | None
Flag: TypeAlias = Annotated[bool, Strict()]
Whole: TypeAlias = Annotated[int, Strict()]
Number: TypeAlias = Annotated[float, Strict()]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    name: 1 << shift for shift, names in ((10, "k kib"), (20, "m mib"), (30, "g gib"), (40, "t tib")) for name in names.split()
}


def one_or_many(value: object) -> object:
    """Let a single value stand for a list of one."""
    return value if value is None or isinstance(value, (list, tuple)) else (value,)


def parse_bytes(value: object) -> object:
    """Turn `"10 GiB"`, `"500 MB"` or a number into bytes."""
    if not isinstance(value, str):
        return value
    digits = value.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = value.strip()[len(digits) :].strip().lower()
    try:
        number = float(digits)
    except ValueError:
        number = -1.0
    if unit not in _UNITS or not 0 <= number < 1e15:
        raise ValueError(f'{value!r} is not a size: write a number of bytes, or "500 MB" or "10 GiB"')
    return int(number * _UNITS[unit])


def _checked_steps(value: tuple[int | str, ...]) -> tuple[int | str, ...]:
    parse_steps(value)
    return value


def _checked_names(value: tuple[str, ...]) -> tuple[str, ...]:
    return parse_names(value).patterns


Patterns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]
NamePatterns: TypeAlias = Annotated[Patterns, AfterValidator(_checked_names)]
Numbers: TypeAlias = Annotated[tuple[Whole | str, ...], BeforeValidator(one_or_many), AfterValidator(_checked_steps)]
Statistics: TypeAlias = Annotated[tuple[StatisticName, ...], BeforeValidator(one_or_many)]


class _Absent:
    """Hides a method of pydantic's base class, so that a field may have its name."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError


class Section(BaseModel):
    """Base of a plan and its parts: frozen, with no unknown key, and described by the line under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ignored_types=(_Absent,))
    construct = _Absent()  # pyright: ignore[reportAssignmentType, reportDeprecated]


class SliceRule(Section):
    """One cut through a tensor; only what is inside is stored. Statistics are always of the whole tensor."""

    dim: Whole
    """Dimension to cut; negative numbers count from the last. A tensor that lacks it is stored whole."""
    begin: Whole = 0
    """First index that is stored; negative numbers count from the end."""
    end: Whole | None = None
    """First index that is no longer stored; left out: up to the end, or as `size` says."""
    size: Annotated[Whole, Field(ge=1)] | None = None
    """How many indices are stored, instead of `end`."""
    length: Annotated[Whole, Field(ge=0)] | None = None
    """Cut only tensors in which this dimension has this length."""

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a slice that is given twice or is empty whatever the tensor."""
        if self.size is not None and (self.end is not None or self.begin < 0):
            raise ValueError("`size` stands beside a `begin` from 0 on and without `end`")
        if self.end is not None and self.end <= self.begin and (self.end < 0) == (self.begin < 0):
            raise ValueError(f"the slice ends at {self.end} and begins at {self.begin}, so it is empty")

    def cut(self) -> Slice:
        """Return the slice as the engine uses it."""
        return Slice(self.dim, self.begin, self.end if self.size is None else self.begin + self.size, self.length)


Slices: TypeAlias = Annotated[tuple[SliceRule, ...], BeforeValidator(one_or_many)]


class DetailRule(Section):
    """What to record for names that match, where it differs from the rest of the plan."""

    match: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(one_or_many), AfterValidator(_checked_names)]
    """Patterns of module, op or parameter names that this entry is for."""
    task: Task | None = None
    """`statistics` or `tensor` for them; left out: as elsewhere."""
    summary: Summary | None = None
    """Which summary for them; left out: as elsewhere."""
    statistics: Statistics | None = None
    """Which statistics for them; left out: as elsewhere."""
    slice: Slices | None = None
    """Which part of their tensors is stored; left out: as elsewhere."""


class Histogram(Section):
    """Where the bins of a histogram lie: `edges`, or `bins` of equal width from `low` to `high`."""

    edges: tuple[Number, ...] | None = None
    """Rising edges; n edges make n - 1 bins, and what lies outside is counted in the first and last bin."""
    bins: Annotated[Whole, Field(ge=1, le=65536)] | None = None
    """Number of bins of equal width."""
    low: Number = -1.0
    """Left edge of the first bin."""
    high: Number = 1.0
    """Right edge of the last bin."""

    def model_post_init(self, context: Any, /) -> None:
        """Refuse bins that are given twice, not at all, or do not rise."""
        if (self.edges is None) == (self.bins is None):
            raise ValueError("a histogram has either `edges` or `bins`")
        edges = self.boundaries()
        if len(edges) < 2 or any(not a < b for a, b in pairwise(edges)):
            raise ValueError("the edges of a histogram must be at least two and rise")

    def boundaries(self) -> tuple[float, ...]:
        """Return the edges of all bins, [bins + 1]."""
        if self.edges is not None:
            return self.edges
        bins = self.bins or 1
        return tuple(self.low + (self.high - self.low) * i / bins for i in range(bins + 1))
