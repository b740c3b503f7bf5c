"""Turns a plan into the settings of MindSpore's own dump, which it reads from the file that MINDSPORE_DUMP_CONFIG names.

MindSpore writes what goes into and comes out of each kernel that it launches, in graph mode on any device.
"""

from __future__ import annotations

from typing import Any

from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import Span, parse_steps
from trainprobe.errors import PlanError

PREFIXES = ("Kernel.Gradients.", "Kernel.", "Primitive.")
_MOST_STEPS = 1000  # that a distance ("every 50 to 1000") is written out to
_DEVICES = 8  # of a machine, where no rank is chosen
# statistic of a plan → what MindSpore calls it
_STATISTICS = {
    **{"max": ("max",), "min": ("min",), "mean": ("avg",), "norm": ("l2norm",), "count": ("count",), "nan": ("nan count",)},
    **{"inf": ("negative inf count", "positive inf count"), "zero": ("zero count",)},
}


def dump_settings(plan: Plan, device: str, asynchronous: bool = False) -> dict[str, Any]:
    """Return the settings of MindSpore's dump for what a plan selects: steps, ranks, operators, inputs and outputs.

    device: "cpu", "gpu" or "ascend". asynchronous: let Ascend write in the background. Raises PlanError for what MindSpore's
    dump cannot do.
    """
    if asynchronous and device != "ascend":
        raise PlanError("--async: MindSpore writes in the background on Ascend alone: leave it out")
    if plan.modules != ("**",):
        raise PlanError("modules: MindSpore's dump selects by kernel: choose `ops` such as Kernel.MatMul, or leave it out")
    devices = [rank for rank in range(_DEVICES) if plan.wants_rank(rank)]
    if not devices:
        raise PlanError(f"rank {list(plan.rank)}: MindSpore's dump selects by device, 0 to {_DEVICES - 1}, and none is chosen")
    kernels = _kernels(plan)
    common: dict[str, Any] = {
        "op_debug_mode": 0,
        "dump_mode": int(bool(kernels)),
        "path": str(plan.output.resolve()),
        "net_name": "Net",
        "iteration": _iterations(plan),
        "saved_data": "tensor" if device == "cpu" or plan.task == "tensor" else "statistic",
        "input_output": {(True, False): 1, (False, True): 2}.get(("input" in plan.data, "output" in plan.data), 0),
        "kernels": kernels,
        "support_device": devices,
    }
    if common["saved_data"] == "statistic":
        common["statistic_category"] = _statistics(plan)
    if asynchronous:
        common["file_format"] = "npy"
    return {"common_dump_settings": common, "e2e_dump_settings": {"enable": not asynchronous, "trans_flag": True}}


def _iterations(plan: Plan) -> str:
    spans = parse_steps(plan.step).spans
    return "all" if any(span.text == "all" for span in spans) else "|".join(map(_iteration, spans))


def _iteration(span: Span) -> str:
    if span.last is None:
        raise PlanError(
            f"step {span.text!r} has no end, which MindSpore's dump cannot say: write {span.text!r} with a last step"
        )
    if span.stride == 1:
        return str(span.first) if span.first == span.last else f"{span.first}-{span.last}"
    steps = range(span.first, span.last + 1, span.stride)
    if len(steps) > _MOST_STEPS:
        raise PlanError(
            f"step {span.text!r} are {len(steps)} steps, more than the {_MOST_STEPS} that are written out: choose fewer"
        )
    return "|".join(map(str, steps))


def _kernels(plan: Plan) -> list[str]:
    """Return the types of operators that are selected; none for all."""
    if plan.ops == ("**",):
        return []
    found: list[str] = []
    for pattern in plan.ops:
        name = next((pattern.removeprefix(prefix) for prefix in PREFIXES if pattern.startswith(prefix)), pattern)
        if not name.isidentifier():
            raise PlanError(f"ops: {pattern!r} is no type of operator: MindSpore's dump takes names such as Kernel.MatMul")
        found.append(name)
    return list(dict.fromkeys(found))


def _statistics(plan: Plan) -> list[str]:
    unknown = [name for name in plan.statistics if name not in _STATISTICS]
    if unknown:
        raise PlanError(f"statistics: {', '.join(unknown)} is none of MindSpore's dump, which has {', '.join(_STATISTICS)}")
    found = [text for name in plan.statistics for text in _STATISTICS[name]]
    return [*found, "hash:md5"] if "md5" in plan.summary else found
