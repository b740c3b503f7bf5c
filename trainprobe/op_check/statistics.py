"""The running statistics that a norm writes beside its result, as a call of their own."""

from __future__ import annotations

from typing import Any

from trainprobe.op_check.cases import Case, Tensor
from trainprobe.op_check.functions import api

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
