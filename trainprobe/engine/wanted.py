"""What a plan wants of a value, as the tape's flags, and of the calls of modules and ops, for the taps of any framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainprobe.engine import tape
from trainprobe.engine.detail import Detail
from trainprobe.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class ModulesWanted:
    """What a plan wants of modules. parameter, micro: whether a parameter of this name, and this micro-batch, is recorded."""

    flags: Callable[[str], int]
    selected: Callable[[str], bool]
    data: frozenset[str]
    forward: bool = True
    backward: bool = True
    recompute: bool = True
    parameter: Callable[[str], bool] = lambda name: True
    micro: Callable[[int], bool] = lambda micro: True


@dataclass(frozen=True, slots=True)
class OpsWanted:
    """What a plan wants of ops. scope: "all", "focus" or "core" (engine.catalog); micro: is this one recorded."""

    flags: Callable[[str], int]
    selected: Callable[[str], bool]
    data: frozenset[str]
    forward: bool = True
    backward: bool = True
    recompute: bool = True
    scope: str = "all"
    micro: Callable[[int], bool] = lambda micro: True


def modules_of_plan(plan: Plan, cuts: list[Detail]) -> ModulesWanted:
    """Return what the dump wants of modules."""
    return ModulesWanted(
        flags=lambda name: flags_of(plan.detail_for("module", name), cuts),
        selected=plan.module_selected,
        data=frozenset(plan.data),
        forward="forward" in plan.phases,
        backward="backward" in plan.phases,
        recompute=plan.recompute == "mark",
        parameter=plan.parameter_selected,
        micro=plan.wants_micro,
    )


def ops_of_plan(plan: Plan, cuts: list[Detail]) -> OpsWanted:
    """Return what the dump wants of ops."""
    return OpsWanted(
        flags=lambda name: flags_of(plan.detail_for("op", name), cuts),
        selected=plan.op_selected,
        data=frozenset(plan.data),
        forward="forward" in plan.phases,
        backward="backward" in plan.phases,
        recompute=plan.recompute == "mark",
        scope=plan.ops_scope,
        micro=plan.wants_micro,
    )


def flags_of(detail: Detail, cuts: list[Detail] | None = None) -> int:
    """Return the tape's flags for a level of detail; one that stores only a slice is put into `cuts` and told by its number."""
    cut = 0
    if detail.wants_tensor and detail.slice and cuts is not None:
        if detail not in cuts:
            cuts.append(detail)
        cut = cuts.index(detail) + 1
    wanted = detail.statistics if detail.wants_statistics else ()
    return (
        (tape.STATS if wanted else 0)
        | (tape.CHECKSUM if detail.wants_checksum else 0)
        | (tape.CRC32 if detail.wants_crc32 else 0)
        | (tape.STD if "std" in wanted else 0)
        | (tape.SUBLOW if "sublow" in wanted else 0)
        | (tape.SAVE if detail.wants_tensor else 0)
        | (cut << tape.CUT)
    )
