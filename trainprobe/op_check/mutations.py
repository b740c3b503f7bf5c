"""What an operator writes into its arguments beside its result, as a call of its own: running statistics, renormed weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainprobe.op_check.cases import Case, Tensor, flat
from trainprobe.op_check.error_locations import furthest
from trainprobe.op_check.execution import operator_of
from trainprobe.op_check.functions import api, writes
from trainprobe.op_check.judge import Judgement

_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_TORCH = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
_MOMENTUM = 0.1


def statistics(case: Case) -> Case | None:
    """Return the update of running statistics of a batch or instance norm, None where the call wrote none."""
    name = api(case.name)
    if name not in ("batch_norm", "instance_norm", "native_batch_norm") or not case.written:
        return None
    names = _FUNCTIONAL if case.name.startswith("Functional.") else _TORCH
    given: dict[str, Any] = {**dict(zip(names, case.args, strict=False)), **case.kwargs}
    after = {names[int(place)] if place.isdigit() else place: tensors for place, tensors in case.written.items()}
    wanted = ("running_mean", "running_var")
    before: list[Tensor | None] = [given.get(short) for short in wanted]
    if any(t is None for t in before) or any(len(after.get(short, ())) != 1 for short in wanted):
        return None
    fresh = given.get("use_input_stats", given.get("training", name == "instance_norm"))
    momentum = given.get("momentum", _MOMENTUM)
    args = (given["input"], *before, bool(fresh), momentum, name == "instance_norm")
    return Case("Written.batch_norm_statistics", args, {}, [after[short][0] for short in wanted])


def written_beside(case: Case) -> Case | None:
    """Return the call with what it wrote as its results, None where it wrote nothing. Raises NotChecked for an unknown one."""
    if not case.written or "out" in case.kwargs:
        return None
    call = operator_of(case)
    places = [*case.written]

    def writes(*args: Any, **kwargs: Any) -> list[Any]:
        call(*args, **kwargs)
        return [args[int(place)] if place.isdigit() else kwargs[place] for place in places]

    name = f"Written.written_by_{api(case.name)}_"
    return replace(case, name=name, outputs=[*flat(dict(case.written))], written={}, function=writes)


def overwritten_arguments(case: Case) -> list[Judgement]:
    """Judge the arguments that a call changed and does not say it writes."""
    if not case.overwritten:
        return []
    allowed = writes(case.name)
    found: list[Judgement] = []
    for place, (before, after) in case.overwritten.items():
        if allowed is None or place.partition(".")[0] in allowed:
            continue
        wrong = (before != after) & ~(before.isnan() & after.isnan()) if before.is_floating_point() else before != after
        if not wrong.any():
            continue
        text = f"it overwrote its argument {place}: {int(wrong.sum())} of {wrong.numel()} elements changed during the call"
        found.append(Judgement("bug", text, math.inf, count=wrong.numel(), furthest=furthest(after, before)))
    return found
