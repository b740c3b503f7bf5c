"""The fields of a plan as keyword arguments, for editors and type checkers; `Plan` says what each does and checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict

Numbers: TypeAlias = int | str | Sequence[int | str]
Patterns: TypeAlias = str | Sequence[str]
Rules: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Section: TypeAlias = Mapping[str, Any] | bool | None
Kind: TypeAlias = Literal["forward", "backward", "optimizer"]
What: TypeAlias = Literal["input", "output", "kwargs", "parameters", "parameter_gradients"]
Side: TypeAlias = Literal["input", "output"]


class PlanFields(TypedDict, total=False):
    """Keyword arguments of `trainprobe.watch` and `trainprobe.Probe`: the fields of `Plan`, in what users may write."""

    output: str | PathLike[str]
    on_existing: Literal["beside", "refuse", "continue", "replace"]
    record: Literal["nothing", "L0", "L1", "mix", "debug"]
    level: Literal["off", "L0", "L1", "mix", "debug"]
    task: Literal["statistics", "tensor"]
    statistics: Patterns
    histogram: Mapping[str, Any] | Literal["exponent"] | None
    quantiles: float | Sequence[float]
    summary: Literal["statistics", "checksum", "md5", "both", "statistics_and_md5"]
    step: Numbers
    rank: Numbers
    micro: Numbers
    modules: Patterns
    ops: Patterns
    parameters: Patterns
    phases: Kind | Sequence[Kind]
    data: What | Sequence[What]
    entry_sides: Side | Sequence[Side]
    tensors: Patterns
    tensor_entries: Patterns
    details: Rules
    slice: Rules
    tensor_format: Literal["safetensors", "pt", "npy"]
    max_bytes: int | str | None
    stacks: bool
    construct: bool
    recompute: Literal["mark", "skip"]
    ops_scope: Literal["all", "core", "focus"]
    scope: tuple[str, str] | None
    entries: Patterns
    sinks: Patterns
    join_runs: bool
    csv_layout: Literal["tidy", "wide"]
    csv_steps: int
    nan_tokens: bool
    told: bool
    console: bool
    on_error: Literal["continue", "raise"]
    reuse: bool
    native: bool
    control: int | None
    audit: Section
    black_box: Section
    config_check: Section
    monitor: Section
    op_check: Section
    replay: Section
    save_gate: Section
    skip: Section
