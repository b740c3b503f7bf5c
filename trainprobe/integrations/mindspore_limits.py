"""What a plan cannot have under MindSpore, and why: `docs/mindspore.md` shows these sentences in its table."""

from __future__ import annotations

from collections.abc import Callable

from trainprobe.engine.capture.mindspore.ops import ops_are_seen
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import PlanError
from trainprobe.monitor.audit.relations import load_relation, relation_names
from trainprobe.monitor.plan import MonitorPlan

_LOSSES = "loss functions are known by their calls in torch.nn.functional"
_BUFFERS = "MindSpore has no buffers: running statistics are parameters without a gradient, which are recorded as such"
_RANDOM = "operators of MindSpore draw from seeds of their own, which the framework does not expose"
_KEPT = "MindSpore keeps no gradient from one step to the next, so none can be left over"
_LOADED = "MindSpore tells no callback when a checkpoint is loaded"
_SCHEDULERS = "learning-rate schedules are values or cells inside the optimizer: there is no scheduler that a loop steps"
_CALLED = "which cells ran with gradients enabled is not known"
_TENSORS = "values of tensors are looked at by torch for this"
_ARGUMENTS = "arguments of recurrent, attention and embedding modules are known of torch.nn"
# relation → why it is not judged under MindSpore, where several share a reason
_NOT_JUDGED = {
    **dict.fromkeys(
        (
            *("absent_classes", "batch_dimension", "copied_targets", "counted_targets", "end_token", "held_numbers"),
            *("loss_inputs", "self_comparison", "shifted_targets", "shuffled_data", "trivial_answer", "weighed_targets"),
        ),
        _LOSSES,
    ),
    **dict.fromkeys(("finite_buffers", "moving_buffers", "replicated_buffers"), _BUFFERS),
    **dict.fromkeys(("random_regions", "random_streams"), _RANDOM),
    **dict.fromkeys(("accumulated_gradients", "cleared_gradients"), _KEPT),
    **dict.fromkeys(("resumed", "saved_and_loaded"), _LOADED),
    **dict.fromkeys(("passed_end", "plateau_direction", "rates_together", "reached_rate", "schedulers_stepped"), _SCHEDULERS),
    **dict.fromkeys(("frozen_and_alive", "never_reached"), _CALLED),
    **dict.fromkeys(
        (
            *("equal_rows", "gathered_features", "idle_experts", "stale_copies", "statistics_once"),
            *("unchanging_inputs", "vanished_tokens"),
        ),
        _TENSORS,
    ),
    **dict.fromkeys(("input_scale", "padding_masks"), _ARGUMENTS),
    **dict.fromkeys(
        ("divided_losses", "gradient_terms", "outer_products", "sampled_without_gradient", "weighted_ranks"),
        "it is read from torch's autograd graph and calls, and MindSpore shows no graph",
    ),
    **dict.fromkeys(("rounded_updates", "update_rule"), "updates are worked out again for optimizers of torch only"),
}
NOT_JUDGED_IN_A_GRAPH = {
    **dict.fromkeys(
        ("finite_together", "gradient_norm", "moment_recurrence", "movement", "moments_present", "scaled_replicas"),
        "gradients stay inside the graph",
    ),
    "settings": "the optimizer's numbers are compiled into the graph and read once",
}
# plan field → why its value makes no difference under MindSpore
WITHOUT_EFFECT = {
    "reuse": "MindSpore shows no write in place: each place is looked at anew, and the numbers are the same",
}


def not_judged() -> dict[str, str]:
    """Return relation → why it is not judged under MindSpore; a reason of its own stands in its file."""
    own = {name: getattr(load_relation(name), "PYTORCH_ONLY", "") for name in relation_names()}
    return _NOT_JUDGED | {name: why for name, why in own.items() if why}


def refuse(plan: Plan, monitor: MonitorPlan | None) -> None:
    """Raise PlanError with a sentence for each part of a plan that cannot be carried out under MindSpore."""
    found = [text for text, applies in _problems(plan, monitor).items() if applies]
    if found:
        raise PlanError("under MindSpore this plan cannot be carried out: " + "; ".join(found))


def _problems(plan: Plan, monitor: MonitorPlan | None) -> dict[str, bool]:
    asks: Callable[[str], bool] = lambda kind: monitor is not None and bool(getattr(getattr(monitor, kind), "on", False))  # noqa: E731
    gradients = monitor.gradients if monitor is not None and monitor.gradients.on else None
    return {
        "monitor: collectives, features and batches are looked at by torch: leave them out": any(
            map(asks, ("collectives", "features", "batches"))
        ),
        "monitor: gradients: unreduced and per_micro: the optimizer is handed gradients that are reduced, once a "
        "step: leave them out": gradients is not None and (gradients.unreduced or gradients.per_micro),
        f"level {plan.level!r} needs MindSpore 2.9 or newer, which hands over its operators: use L0": plan.level
        in ("L1", "mix")
        and not ops_are_seen(),
        "ops_scope: its lists are of torch functions: leave it at all and select by `ops`": plan.ops_scope != "all",
        "histogram and quantiles are computed by torch: leave them out": plan.histogram is not None or bool(plan.quantiles),
        "tensor_format 'pt' is written by torch: use safetensors or npy": plan.tensor_format == "pt",
        "control: a plan stays as it is while a MindSpore training runs: leave it out": plan.control is not None,
        **{why: True for program in plan.programs.values() if (why := getattr(program, "NOT_UNDER", {}).get("mindspore"))},
    }
