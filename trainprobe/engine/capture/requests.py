"""What a plan requests of a value, as the tape's flags, and of the calls of modules and ops, for any framework's taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from trainprobe.engine.plan.detail import Detail
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.stats.partials import CHECKSUM, CRC32, STATS, asked_flags
from trainprobe.engine.tape import CUT, SAVE


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What a plan wants of calls of one kind.

    flags: of an op's name, or of a module's name and class. micro: whether this micro-batch is recorded.
    """

    flags: Callable[..., int]
    selected: Callable[[str], bool]
    data: frozenset[str]
    forward: bool = True
    backward: bool = True
    recompute: bool = True
    micro: Callable[[int], bool] = lambda micro: True


@dataclass(frozen=True, slots=True)
class ModuleRequest(CallRequest):
    """What a plan wants of modules. parameter: whether a parameter of this name is recorded."""

    parameter: Callable[[str], bool] = lambda name: True


@dataclass(frozen=True, slots=True)
class OpRequest(CallRequest):
    """What a plan wants of ops. scope: "all", "focus" or "core" (engine.plan.catalog)."""

    scope: str = "all"


@dataclass(frozen=True, slots=True)
class StatesRequest:
    """What to record of parameters: flags by name (0 for one that is not selected), for each sort of tensor.

    without: slots that are not recorded at all, such as "grad_unreduced". update: the change that the step makes, which needs a
    copy of the parameter while the optimizer runs. every: sort ("value", "gradient", "state", "update") → at each so
    many collected steps only.
    """

    value: Callable[[str], int]
    gradient: Callable[[str], int]
    state: Callable[[str], int]
    after: bool = True
    without: frozenset[str] = frozenset()
    update: Callable[[str], int] = lambda name: 0
    every: Mapping[str, int] = field(default_factory=dict[str, int])


class FeatureRequest(NamedTuple):
    """What the monitor wants of one deeper feature. names: patterns of what is looked at. settings: others, by name."""

    observer: str
    names: tuple[str, ...]
    settings: Mapping[str, Any]


def no_flags(name: str, module_class: str = "") -> int:
    """Return the tape's flags for what is not looked at."""
    return 0


NO_MODULES = ModuleRequest(no_flags, lambda name: False, frozenset(), forward=False, backward=False)
NO_STATES = StatesRequest(no_flags, no_flags, no_flags)


def modules_of_plan(plan: Plan, cuts: list[Detail]) -> ModuleRequest:
    """Return what the dump wants of modules."""
    return ModuleRequest(**_of_plan("module", plan.module_selected, plan, cuts), parameter=plan.parameter_selected)


def ops_of_plan(plan: Plan, cuts: list[Detail]) -> OpRequest:
    """Return what the dump wants of ops."""
    return OpRequest(**_of_plan("op", plan.op_selected, plan, cuts), scope=plan.ops_scope)


def _of_plan(kind: Literal["module", "op"], selected: Callable[[str], bool], plan: Plan, cuts: list[Detail]) -> dict[str, Any]:
    """Return the fields of CallRequest by name."""
    return {
        "flags": lambda name, module_class="": flags_of(plan.detail_for(kind, name, module_class), cuts),
        "selected": selected,
        "data": frozenset(plan.data),
        "forward": "forward" in plan.phases,
        "backward": "backward" in plan.phases,
        "recompute": plan.recompute == "mark",
        "micro": plan.wants_micro,
    }


def flags_of(detail: Detail, cuts: list[Detail] | None = None) -> int:
    """Return the tape's flags for a level of detail; one that stores only a slice is added to `cuts` and numbered."""
    cut = 0
    if detail.wants_tensor and detail.slice and cuts is not None:
        if detail not in cuts:
            cuts.append(detail)
        cut = cuts.index(detail) + 1
    statistics = detail.statistics if detail.wants_statistics else ()
    return (
        (STATS if statistics else 0)
        | (CHECKSUM if detail.wants_checksum else 0)
        | (CRC32 if detail.wants_crc32 else 0)
        | asked_flags(statistics)
        | (SAVE if detail.wants_tensor else 0)
        | (cut << CUT)
    )
