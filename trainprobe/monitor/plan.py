"""The `monitor` section of a plan: what is collected at every step, which rules judge it, and what a finding does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from trainprobe.engine.plan.field_types import NamePatterns, Numbers
from trainprobe.engine.plan.subplans import read_section
from trainprobe.errors import PlanError
from trainprobe.monitor.feature_plan import Features, Whole
from trainprobe.monitor.rules import OPTIONAL, RuleOptions, load_rule, rule_names


class _MonitorSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True)


class Collect(_MonitorSection):
    """One kind of number that is collected. In a plan `true` and `false` stand for the defaults and for none."""

    on: bool = True
    """Collect it at all."""
    names: NamePatterns = ("**",)
    """Patterns of the modules or parameters it is collected for; a leading `!` excludes."""
    every: Whole = 1
    """Collect it at each so many collected steps."""


def _switch(value: object) -> object:
    return {"on": value} if isinstance(value, bool) else value


Kind: TypeAlias = Annotated[Collect, BeforeValidator(_switch)]
OFF = Collect(on=False)


class Gradients(Collect):
    """Gradients of parameters."""

    reduced: bool = True
    """After they were joined over the ranks, as the optimizer sees them."""
    unclipped: bool = True
    """Before they are clipped too, where they are, and the norm that the clipping reports."""
    unreduced: bool = False
    """Before they are joined over the ranks."""
    per_micro: bool = False
    """The unreduced ones for each micro-batch."""


class Actions(_MonitorSection):
    """How findings leave the process."""

    console: bool = True
    """Print the warnings and errors of the rules; `console: false` of the plan silences all else too."""
    webhook: str | None = None
    """URL that gets each alert as a JSON POST, from the writer's thread; a failure is told once and never waited for."""
    webhook_timeout: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Seconds that a webhook may take."""
    callback: Callable[..., Any] | None = None
    """Function that is called with each Finding of a rule that has the action alert."""
    dump_steps: Whole = 1
    """How many of the following steps are collected in full by the action dump."""
    dump_limit: Annotated[int, Field(strict=True, ge=0)] = 3
    """How many times a run may be told to dump."""

    @field_validator("webhook")
    @classmethod
    def _check_webhook(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not a URL: it begins with http:// or https://")
        return value


class MonitorPlan(_MonitorSection):
    """All settings of the monitor."""

    step: Numbers = ("all",)
    """Which steps are monitored: numbers, "100-110", "every 50", or "all"."""
    activations: Kind = Collect()
    """Inputs and outputs of modules."""
    activation_gradients: Kind = OFF
    """Gradients of the outputs and inputs of modules."""
    parameters: Kind = Collect()
    """Values of parameters before the step, and after it."""
    gradients: Annotated[Gradients, BeforeValidator(_switch)] = Gradients()
    """Gradients of parameters."""
    optimizer_state: Kind = OFF
    """Tensors that the optimizer keeps for a parameter, such as exp_avg and exp_avg_sq, and its step counter."""
    update: Kind = OFF
    """The change that a step makes to each parameter."""
    collectives: Kind = OFF
    """Collective calls: which, how large, in which group, and the statistics of what goes in and comes out."""
    scalars: Kind = Collect()
    """Loss, learning rate, loss scale, reported gradient norm, token counts."""
    batches: Kind = OFF
    """A fingerprint of what the model is called with, for each micro-batch, and the number of tokens; on for the black box."""
    features: Features = Features()
    """Deeper numbers, worked out where they are asked for: attention, weights, routers, formats, dead_units,
    loss_rows."""
    rules: Mapping[str, RuleOptions] = Field(default_factory=dict, validate_default=True)
    """Rule name → its settings; `true` for its defaults, `false` to leave it out. Those that are not named judge with their
    defaults, except mean_deviation and threshold, which judge only where they are named."""
    actions: Actions = Actions()
    """How findings leave the process."""

    @property
    def may_dump(self) -> bool:
        """Whether a rule may ask for the next steps to be collected in full."""
        return any("dump" in rule.actions for rule in self.rules.values()) and self.actions.dump_limit > 0

    @field_validator("rules", mode="before")
    @classmethod
    def _check_rules(cls, value: object) -> Mapping[str, RuleOptions]:
        return make_rules(value)


def make_rules(spec: object) -> dict[str, RuleOptions]:
    """Return rule name → settings, defaults filled in. Raises PlanError for an unknown rule or setting."""
    if isinstance(spec, (list, tuple)):
        names = [str(name) for name in cast("list[object]", spec)]
        return {name: load_rule(name).Options() for name in names}
    given: dict[str, Any] = dict(cast("Mapping[str, Any]", spec)) if isinstance(spec, Mapping) else {}
    chosen: dict[str, Any] = {name: True for name in rule_names() if name not in OPTIONAL} | given
    made: dict[str, RuleOptions] = {}
    for name, settings in chosen.items():
        rule = load_rule(name)
        if isinstance(settings, RuleOptions):
            made[name] = settings
        elif settings is not False and settings is not None:
            made[name] = _options(f"rules.{name}", rule.Options, {} if settings is True else settings)
    return made


def _options(path: str, model: type[RuleOptions], settings: Any) -> RuleOptions:
    if not isinstance(settings, Mapping):
        raise PlanError(f"monitor: {path}: {settings!r} cannot be used: write true, false or a section of settings")
    return read_section("monitor", model, dict(cast("Mapping[str, Any]", settings)), at=path)


def validate(settings: Mapping[str, Any] | bool | None = True) -> MonitorPlan:
    """Return the monitor's plan of a section. Raises PlanError, which names each key, its value and what was probably meant."""
    return read_section("monitor", MonitorPlan, settings)
