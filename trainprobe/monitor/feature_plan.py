"""The `features` of the `monitor` section of a plan: numbers that cost more than a reduction, all off unless they are named."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainprobe.engine.plan.field_types import NamePatterns, one_or_many

Whole: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
FormatName: TypeAlias = Literal["fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16"]
Slot: TypeAlias = Literal["output", "grad_output", "value", "grad"]


def switch(value: object) -> object:
    """Let `true` and `false` stand for a section with its defaults, and for none."""
    return {"on": value} if isinstance(value, bool) else {"on": True, **value} if isinstance(value, dict) else value


class FeatureSection(BaseModel):
    """OBSERVER: the file of `engine.capture.features` that works it out, with the fields of the section other than `names`."""

    OBSERVER: ClassVar[str]
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    on: bool = False
    """Work it out at all; naming the section switches it on."""
    names: NamePatterns = ("**",)
    """Patterns of the modules or parameters it is worked out for; a leading `!` excludes."""
    every: Whole = 1
    """Work it out at each so many collected steps."""


class AttentionSettings(FeatureSection):
    """Entropy, largest logit and peak of attention, for each head."""

    OBSERVER: ClassVar[str] = "attention"

    rows: Whole = 64
    """How many queries of a sequence are looked at, evenly spaced; at least its length: all of them."""
    sequences: Whole = 4
    """How many sequences of a batch are looked at, evenly spaced."""


class WeightSettings(FeatureSection):
    """Spectral norm and stable rank of parameters of two and more dimensions."""

    OBSERVER: ClassVar[str] = "weight_spectra"

    iterations: Whole = 4
    """Power iterations at each later step; the first step of a parameter makes 24."""


class RouterSettings(FeatureSection):
    """Load, entropy and similarity of the routers of mixtures of experts."""

    OBSERVER: ClassVar[str] = "routers"

    names: NamePatterns = (r"re:(^|\.)(router|gate|wg)$",)
    """Patterns of the routers, modules with a weight [experts, width]."""
    top_k: Whole | None = None
    """How many experts a token gets, where neither the router's output nor the module tells it."""


class FormatSettings(FeatureSection):
    """Shares of values that low-precision formats would lose, and how often each exponent is used."""

    OBSERVER: ClassVar[str] = "number_formats"

    formats: Annotated[tuple[FormatName, ...], BeforeValidator(one_or_many)] = ("fp8_e4m3", "fp8_e5m2")
    """Which formats: fp4_e2m1, fp8_e4m3, fp8_e5m2, fp16, bf16."""
    slots: Annotated[tuple[Slot, ...], BeforeValidator(one_or_many), Field(min_length=1)] = (
        "output",
        "grad_output",
        "value",
        "grad",
    )
    """The values that are looked at: outputs of modules and their gradients, values of parameters and their gradients."""
    scale: Literal["amax"] | Annotated[float, Field(gt=0)] = 1.0
    """What values are multiplied by before they are cast: a number, or `amax`, the largest number of the format over the
    largest magnitude of the tensor."""
    exponents: bool = True
    """Count the elements per power of two too; TensorBoard shows them as histograms."""


class DeadUnitSettings(FeatureSection):
    """Share of units that are silent for all tokens of a call."""

    OBSERVER: ClassVar[str] = "dead_units"

    names: NamePatterns = (r"re:(?i)(act|relu|gelu|silu)[^.]*$",)
    """Patterns of the modules, by default those whose last name sounds like an activation function."""
    limit: Annotated[float, Field(ge=0)] = 0.0
    """The largest magnitude that counts as silent."""


class LossRowSettings(FeatureSection):
    """The row of each batch with the largest cross-entropy."""

    OBSERVER: ClassVar[str] = "loss_rows"

    tokens: Annotated[int, Field(ge=0, le=128)] = 0
    """How many tokens of that row are recorded, around the place of its largest loss, as `loss_row_tokens`: a spike says them,
    as text where the Trainer of Hugging Face has a tokenizer."""


class Features(BaseModel):
    """All deeper features. Each takes `true`, or a section of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    attention: Annotated[AttentionSettings, BeforeValidator(switch)] = AttentionSettings()
    """Attention of each head: entropy, largest logit, peak."""
    weights: Annotated[WeightSettings, BeforeValidator(switch)] = WeightSettings()
    """Spectral norm and stable rank of weights."""
    routers: Annotated[RouterSettings, BeforeValidator(switch)] = RouterSettings()
    """Load of each expert, entropy of the choice, similarity of the experts' rows."""
    formats: Annotated[FormatSettings, BeforeValidator(switch)] = FormatSettings()
    """What low-precision formats would lose."""
    dead_units: Annotated[DeadUnitSettings, BeforeValidator(switch)] = DeadUnitSettings()
    """Share of silent units."""
    loss_rows: Annotated[LossRowSettings, BeforeValidator(switch)] = LossRowSettings()
    """The row of the batch that has most of the loss; a spike names it."""

    def chosen(self) -> list[FeatureSection]:
        """Return the sections of those that are worked out."""
        sections = [getattr(self, name) for name in type(self).model_fields]
        return [section for section in sections if section.on]

    @property
    def on(self) -> bool:
        """Whether any is worked out."""
        return bool(self.chosen())
