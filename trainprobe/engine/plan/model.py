"""What a run shall record, when, where and how: one frozen, strictly checked object that the whole engine reads.

`load_plan` makes a `Plan` from a YAML or JSON file, a dict or keyword arguments. Every field says below it what it does;
`trainprobe plan --explain` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from trainprobe.engine.plan.defaults import filled
from trainprobe.engine.plan.detail import Detail, Summary
from trainprobe.engine.plan.field_types import (
    Data,
    DetailRule,
    Flag,
    Histogram,
    Level,
    NamePatterns,
    Number,
    Numbers,
    Patterns,
    PlanPhase,
    Record,
    Section,
    Side,
    Slices,
    Statistics,
    SubPlan,
    Task,
    Whole,
    one_or_many,
    parse_bytes,
)
from trainprobe.engine.plan.problems import describe_problems
from trainprobe.engine.plan.selection import Names, Steps, parse_steps
from trainprobe.engine.plan.subplans import program_file, sections, sink_names
from trainprobe.errors import PlanError, did_you_mean


def full_name(name: str, module_class: str = "") -> str:
    """Return what `tensor_entries` are looked for in: `Module.layers.0.fc.Linear.` or `Functional.linear.`, say."""
    return f"Module.{name}.{module_class}." if module_class else f"{name}."


def _as_of_torch(text: str) -> str:
    """Return a text of `tensor_entries` with the word for a module that `full_name` has: MindSpore's dumps say `Cell`."""
    return f"Module.{text.removeprefix('Cell.')}" if text.startswith("Cell.") else text


class Plan(Section):
    """What a run shall record. Frozen; every key is checked, and an unknown one is an error."""

    output: Annotated[Path, Field(strict=False)] = Path("./probe_out")
    """Folder that everything is written to; it is created."""
    on_existing: Literal["beside", "refuse", "continue", "replace"] = "beside"
    """What to do when `output` already holds a run: beside writes a new run to `output.2` and so on, and goes on in the newest
    run where the training is resumed from a checkpoint; refuse to start; continue beside its steps; or replace them."""
    record: Record = "nothing"
    """What is dumped of a step: L0: modules; L1: every op; mix: both, with the tree of which op ran in which module; debug:
    only what `save` is handed; nothing. Without it a plan dumps L0 where another field says what to dump (`step`, `task`,
    `modules` and so on), else nothing. A plan that asks for nothing at all is the default plan: its `monitor` and `audit`
    judge each step."""
    level: Level = "off"
    """The older name of `record`, in which `nothing` is `off`."""
    task: Task = "statistics"
    """statistics: numbers about each tensor; tensor: its values too."""
    statistics: Statistics = ("max", "min", "mean", "norm")
    """Which numbers about each tensor. An empty list records the structure only."""
    histogram: Histogram | Literal["exponent"] | None = None
    """Counts of values per bin: fixed bins (`edges`, or `bins`, `low` and `high`), or `exponent`, one bin for each power
    of two."""
    quantiles: Annotated[tuple[Annotated[Number, Field(ge=0, le=1)], ...], BeforeValidator(one_or_many)] = ()
    """Quantiles of each tensor to record, from 0 to 1."""
    summary: Summary = "statistics"
    """statistics; checksum: a 64-bit fingerprint of the bits; md5: the CRC-32 of the bytes that existing files carry under
    that name; both: statistics and checksum; statistics_and_md5: statistics and md5."""
    step: Numbers = ("all",)
    """Which steps are collected: numbers, "100-110", "every 50", "every 50 from 100 to 1000", or "all"."""
    rank: Numbers = ("all",)
    """Which global ranks collect; written as `step` is."""
    micro: Numbers = ("all",)
    """Which micro-batches of a step are collected, counted from 0; written as `step` is."""
    modules: NamePatterns = ("**",)
    """Patterns of the modules that are recorded: globs over dotted names (`*` within a part, `**` across parts),
    `re:` regular expressions; a leading `!` excludes."""
    ops: NamePatterns = ("**",)
    """Patterns of the ops that are recorded, such as `Functional.linear` or `Tensor.*`."""
    parameters: NamePatterns = ("**",)
    """Patterns of the parameters whose values and gradients are recorded."""
    phases: Annotated[tuple[PlanPhase, ...], Field(min_length=1), BeforeValidator(one_or_many)] = get_args(PlanPhase)
    """Which parts of a step are recorded."""
    data: Annotated[tuple[Data, ...], Field(min_length=1), BeforeValidator(one_or_many)] = get_args(Data)
    """Which values of a call are recorded; in the backward phase, `output` holds the gradients of outputs and `input` the
    gradients of inputs."""
    entry_sides: Annotated[tuple[Side, ...], Field(min_length=1), BeforeValidator(one_or_many)] = get_args(Side)
    """Which sides of a call a dump holds, as its entries name them: the `input` of a backward call are the gradients of the
    outputs, its `output` those of the inputs."""
    tensors: NamePatterns = ()
    """Patterns of modules, ops and parameters whose values are saved too, whatever `task` says."""
    tensor_entries: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_many)] = ()
    """Save the values also of ops and modules whose full names, such as `Functional.linear.` or
    `Module.layers.0.fc.Linear.` (the class behind the name), contain one of these texts."""
    details: Annotated[tuple[DetailRule, ...], BeforeValidator(one_or_many)] = ()
    """Other levels of detail for some names: a list of entries with `match` and what differs; later entries win."""
    slice: Slices = ()
    """Parts of tensors to store instead of the whole: a list of `dim`, `begin` and `end` or `size`."""
    tensor_format: Literal["safetensors", "pt", "npy"] = "safetensors"
    """safetensors: one file a rank and step; pt, npy: one file a tensor, for tools that expect that."""
    max_bytes: Annotated[Annotated[Whole, Field(ge=0)] | None, BeforeValidator(parse_bytes)] = None
    """Most bytes that tensors of one rank may take on disk, as a number or as "10 GiB"; collection of tensors then ends
    with a finding."""
    stacks: Flag = True
    """Record where in the program each call came from."""
    construct: Flag = True
    """Record which call ran inside which module."""
    recompute: Literal["mark", "skip"] = "mark"
    """The forward that activation checkpointing runs again: mark it as such, or leave it out."""
    ops_scope: Literal["all", "core", "focus"] = "all"
    """all: every op; focus: without ops that only move or reshape data; core: ops that calculate and commonly decide
    precision."""
    scope: tuple[str, str] | None = None
    """First and last call to record, both included, as full names such as `Module.layers.0.Block.forward.0`."""
    entries: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_many)] = ()
    """Keep only calls whose full name, such as `Module.layers.0.fc.Linear.forward.0` or `Functional.linear.1.backward`,
    contains one of these texts; at level mix also what ran inside such a module."""
    sinks: Patterns = ("dump", "parquet")
    """Which writers: dump, parquet (the run log, docs/run_log.md), csv, tensorboard, memory, jsonl (each step as a line of
    JSON, for programs that read that), a service (wandb, mlflow, trackio, otlp, prometheus: docs/services.md), one that another
    package brings, or files of the two monitors of mindstudio-probe (msprobe_csv, msprobe_second_csv, msprobe_anomaly)."""
    join_runs: Flag = True
    """Send to a run of W&B, MLflow or Trackio that the script has open, as `trainprobe/…`, and write TensorBoard's files where
    the script's trainer does; false: a run and a folder of its own, with every step (docs/services.md)."""
    csv_layout: Literal["tidy", "wide"] = "tidy"
    """tidy: one row a value and statistic; wide: one row a value, one column a statistic."""
    csv_steps: Annotated[Whole, Field(ge=1)] = 1000
    """How many steps a file of the wide layout, of msprobe_csv and of msprobe_second_csv holds."""
    nan_tokens: Flag = False
    """Write the bare tokens NaN and Infinity into JSON, for readers that insist on them; such a file is not strict JSON."""
    told: Flag = True
    """Record numbers that the script gives to W&B, MLflow, TensorBoard, trackio, Accelerate or a trainer's own log as scalars
    `told/NAME` of the step (docs/told.md)."""
    console: Flag = True
    """Print warnings and errors when they happen, and one line when the run ends. Faults of the tool itself are printed
    in any case."""
    on_error: Literal["continue", "raise"] = "continue"
    """What a fault of the tool itself does: disable the tool and let the training go on, or raise. Where it is left out,
    the environment variable TRAINPROBE_ON_ERROR decides."""
    reuse: Flag = True
    """Look at each value once and refer to it afterwards; switch off only to examine the tool."""
    native: Flag = True
    """Use the compiled kernels where they exist; the results are the same without."""
    control: Annotated[Whole, Field(ge=1)] | None = None
    """At each so many steps look whether `control.yaml` in `output` has changed, which may change `step` and parts of
    `monitor` and `audit` while the run goes on, on all ranks at the same step (one small collective at each look)."""
    for _section, _text in sections().items():  # one for each program
        __annotations__[_section] = SubPlan
        locals()[_section] = Field(default=None, description=" ".join(_text.split()))
    del _section, _text  # pyright: ignore[reportPossiblyUnboundVariable]

    _notes: tuple[str, ...] = PrivateAttr(default=())

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise PlanError(describe_problems(error, Plan, lambda _: "plan")) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  (keeps `model_validate` from calling it)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, fields: Any) -> Any:
        return filled(fields) if isinstance(fields, dict) else fields  # pyright: ignore[reportUnknownArgumentType]

    @field_validator("modules", "ops", "parameters")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError('the list is empty and would select nothing: leave the key out, or write "**"')
        return value

    @field_validator("sinks")
    @classmethod
    def _check_sinks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = sink_names()
        for name in value:
            if name not in known:
                raise ValueError(f"{name!r} is not a writer{did_you_mean(name, known)} (there are: {', '.join(known)})")
        return value

    @field_validator(*sections())
    @classmethod
    def _check_section(cls, value: Any, info: Any) -> Any:
        if isinstance(value, dict):
            program_file(str(info.field_name)).validate(value)
        return value  # pyright: ignore[reportUnknownVariableType]

    def section(self, program: str) -> Any:
        """Return the section of a program as it is written: a mapping, true for its defaults, false or None for none."""
        return getattr(self, program)

    @property
    def judges(self) -> bool:
        """Whether steps are judged: by a monitor or an audit."""
        return bool(self.section("monitor") or self.section("audit"))

    @property
    def monitor_settings(self) -> Mapping[str, Any]:
        """What the section `monitor` says; nothing where it is left out or true."""
        section = self.section("monitor")
        return section if isinstance(section, dict) else {}  # pyright: ignore[reportUnknownVariableType]

    @cached_property
    def programs(self) -> Mapping[str, Any]:
        """The programs that the plan asks for, in the order in which they are called, each with its file."""
        files = {name: program_file(name) for name in sections() if self.section(name)}
        return dict(sorted(files.items(), key=lambda item: getattr(item[1], "ORDER", len(files))))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the source asked for and this plan has no equivalent for."""
        return self._notes

    @cached_property
    def _steps(self) -> Steps:
        return parse_steps(self.step)

    @cached_property
    def _ranks(self) -> Steps:
        return parse_steps(self.rank)

    @cached_property
    def _micros(self) -> Steps:
        return parse_steps(self.micro)

    @cached_property
    def _names(self) -> dict[str, Names]:
        fields = {"modules": self.modules, "ops": self.ops, "parameters": self.parameters, "tensors": self.tensors}
        return {field: Names(patterns) for field, patterns in fields.items()}

    @cached_property
    def _detail_names(self) -> tuple[Names, ...]:
        return tuple(Names(rule.match) for rule in self.details)

    @cached_property
    def base_detail(self) -> Detail:
        """The level of detail where neither `tensors` nor `details` says otherwise."""
        return Detail(self.task, self.summary, tuple(self.statistics), tuple(s.cut() for s in self.slice))

    def wants_step(self, number: int) -> bool:
        """Tell whether step `number` is collected; never at level off."""
        return self.level != "off" and number in self._steps

    def wants_rank(self, rank: int) -> bool:
        """Tell whether this global rank collects."""
        return rank in self._ranks

    def wants_micro(self, micro: int | None) -> bool:
        """Tell whether this micro-batch is collected; what belongs to the whole step (None) always is."""
        return micro is None or micro in self._micros

    def last_step(self) -> int | None:
        """Return the last step that is collected, or None when collecting never ends."""
        return self._steps.last()

    def pending_steps(self, last_seen: int, first_seen: int = 0) -> tuple[str, ...]:
        """Return the pieces of `step`, as written, that select no step in first_seen..last_seen."""
        return self._steps.pending(first_seen, last_seen)

    def module_selected(self, name: str) -> bool:
        """Tell whether the module with this dotted name is recorded."""
        return name in self._names["modules"]

    def op_selected(self, name: str) -> bool:
        """Tell whether the op with this name, such as `Functional.linear`, is recorded."""
        return name in self._names["ops"]

    def parameter_selected(self, name: str) -> bool:
        """Tell whether the parameter with this dotted name is recorded."""
        return name in self._names["parameters"]

    def detail_for(self, kind: str, name: str, module_class: str = "") -> Detail:
        """Return what is recorded of a name, be it a module (of this class), op or parameter; callers keep the answer."""
        detail = self.base_detail
        full = full_name(name, module_class)
        if name in self._names["tensors"] or any(_as_of_torch(text) in full for text in self.tensor_entries):
            detail = detail.changed(task="tensor")
        for rule, names in zip(self.details, self._detail_names, strict=True):
            if name in names:
                cuts = None if rule.slice is None else tuple(s.cut() for s in rule.slice)
                detail = detail.changed(task=rule.task, summary=rule.summary, statistics=rule.statistics, slice=cuts)
        return detail

    def unmatched(self, names: Iterable[str], field: str = "modules") -> list[tuple[str, str | None]]:
        """Return the patterns of a field that match none of `names`, each with the nearest name or None.

        field: modules, ops, parameters, tensors or details.
        """
        if field == "details":
            known = list(names)
            return [pair for rule in self._detail_names for pair in rule.unmatched(known)]
        return self._names[field].unmatched(names)
