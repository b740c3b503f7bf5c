"""The JSON of the monitor, which that tool's `TrainerMon` reads.

A section `targets` names modules, or the beginning of parameters' names; switches say what is watched of them. What is
recorded stands in the monitor's CSV files under the names and columns that they have there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from trainprobe.engine.plan.legacy.translation import Translation
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import did_you_mean

_SWITCHES = {
    *("xy_distribution", "all_xy", "forward_only", "backward_only", "wg_distribution", "monitor_mbs_grad"),
    *("param_distribution", "mv_distribution", "mg_direction", "ur_distribution", "recording_l2_features", "stack_info"),
    *("print_struct", "squash_name", "dynamic_on"),
}
_KNOWN = _SWITCHES | {
    *("targets", "ops", "eps", "ndigits", "cc_distribution", "l2_targets", "sa_order", "module_ranks", "start_step"),
    *("step_interval", "collect_times", "step_count_per_record", "append_output", "alert", "format"),
}
STATISTICS = {**{name: name for name in ("norm", "min", "max", "mean")}, "nans": "nan", "zeros": "zero"}
ALWAYS = {"id", "shape", "dtype"}  # columns of shape and dtype are always there; an id is worth nothing later
WITHOUT_END = 100_000_000  # the default of collect_times

# switch → what is different about what it asks for
_NOTES = {
    "ur_distribution": "the statistics of the update of each parameter are recorded, not heat maps of its elements",
    "mg_direction": "the share of gradients whose sign is the momentum's is not recorded: compare the files grad_reduced and "
    "exp_avg",
    "monitor_mbs_grad": "the gradient of each micro-batch alone is recorded, not what they have added up to",
    "stack_info": 'stack_info.csv is not written: `level: L0` with `step: ["0"]` in a plan records the calls of one step with '
    "their stacks",
    "print_struct": 'the training is not stopped and module_struct.json is not written: `level: L0` with `step: ["0"]` in a '
    "plan records the modules of one step with the shapes of what goes in and comes out",
    "squash_name": "names are written whole; in `targets` a part of a name from a dot on is enough",
    "append_output": "each run has folders of its own; set_monitor(start_iteration=) numbers the steps of a resumed run on",
    "dynamic_on": "this file is read once: while the training runs, `control.yaml` in the output folder changes what is "
    "monitored (docs/monitor.md)",
}
_HOOKS = {
    "attention_hook": "attention",
    "linear_hook": "weights",
    "moe_router_weight_hook": "routers",
    "moe_router_logit_hook": "routers",
}


def is_dialect(fields: Mapping[str, Any]) -> bool:
    """Tell whether these keys are the monitor's and none of them a plan's alone."""
    own = set(Plan.model_fields) - _KNOWN
    return bool((_SWITCHES | {"targets", "l2_targets", "cc_distribution"}) & fields.keys()) and not own & fields.keys()


def translate(config: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a plan and the notes; PlanError names what cannot be carried over."""
    out = Translation(origin)
    out.check_keys(config, _KNOWN)
    for key in _SWITCHES & config.keys():
        if not isinstance(config[key], bool):
            raise out.refuse(key, f"{config[key]!r} cannot be used: write true or false")
    for key, sentence in _NOTES.items():
        if config.get(key):
            out.note(key, sentence)
    fields = out.fields
    fields |= {"output": "monitor_output", "level": "off", "sinks": ["parquet", "msprobe_csv"]}
    fields["csv_steps"] = out.whole(config, "step_count_per_record", 1, 1)
    fields["statistics"] = statistics(out, config.get("ops", ["norm"]), "ops")
    if config.get("eps") is not None and "zero" in fields["statistics"]:
        out.note("eps", "zeros is the share of elements that are exactly zero, whatever eps is")
    if config.get("module_ranks"):
        fields["rank"] = config["module_ranks"]
    _format(out, config.get("format", "csv"))
    times = out.whole(config, "collect_times", WITHOUT_END, 0)
    first, interval = out.whole(config, "start_step", 0, 0), out.whole(config, "step_interval", 1, 1)
    fields["monitor"] = {"step": steps(first, interval, times), **_kinds(out, config)}
    return fields, tuple(out.notes)


def statistics(out: Translation, ops: object, key: str) -> list[str]:
    """Return the statistics of a list of that tool's names, in its order; the norm where none is known, as there."""
    names = out.texts(ops, key)
    for name in names:
        if name not in STATISTICS.keys() | ALWAYS:
            out.note(key, f"{name!r} is not a statistic, not used{did_you_mean(name, list(STATISTICS))}")
    return list(dict.fromkeys(STATISTICS[name] for name in names if name in STATISTICS)) or ["norm"]


def steps(first: int, interval: int, times: int) -> str:
    """Return the steps from the first on, `times` in all, as a plan writes them."""
    text = "all" if (first, interval) == (0, 1) else f"every {interval} from {first}"
    return text if times >= WITHOUT_END else f"every {interval} from {first} to {first + max(times - 1, 0) * interval}"


def _format(out: Translation, name: object) -> None:
    if name == "tensorboard":
        out.fields["sinks"] = ["parquet", "tensorboard"]
        out.note("format", "tags are those of trainprobe, such as gradients/layers.0.fc.weight/grad/norm")
    elif name == "api":
        out.fields["sinks"] = ["parquet"]
    elif name != "csv":
        out.note("format", f"{name!r} is not a format: CSV files are written")


def _kinds(out: Translation, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the monitor watches, and its rules."""
    modules, parameters = _targets(out, config.get("targets"))
    watched = bool(config.get("xy_distribution"))
    modules = ["**"] if config.get("all_xy") else modules

    def switched(key: str, names: Sequence[str], **more: Any) -> Any:
        return {"names": [*names], **more} if config.get(key) else False

    only_forward, only_backward = bool(config.get("forward_only")), bool(config.get("backward_only"))
    if watched and only_forward and only_backward:
        out.note("forward_only", "with backward_only nothing is watched of modules")
    kinds: dict[str, Any] = {
        "activations": {"names": modules} if watched and not only_backward else False,
        "activation_gradients": {"names": modules} if watched and not only_forward else False,
        "parameters": switched("param_distribution", parameters),
        "gradients": switched("wg_distribution", parameters, unreduced=True),
        "optimizer_state": switched("mv_distribution", parameters),
        "update": switched("ur_distribution", parameters),
        "collectives": _collectives(out, config.get("cc_distribution")),
    }
    if config.get("monitor_mbs_grad") and kinds["gradients"]:
        kinds["gradients"]["per_micro"] = True
    if config.get("recording_l2_features"):
        kinds["features"] = _features(out, config.get("l2_targets"))
    if rules := _rules(out, config.get("alert")):
        kinds["rules"] = rules
    return kinds


def _targets(out: Translation, targets: object) -> tuple[list[str], list[str]]:
    """Return the patterns of the modules and of the parameters that `targets` names; all where it names none."""
    names = [*out.section(targets, "targets")]
    modules = [_pattern(name) for name in names if not name.endswith((".weight", ".bias"))]
    return (modules or ["!**"] if names else ["**"]), [_pattern(name, below=True) for name in names] or ["**"]


def _pattern(text: str, *, below: bool = False) -> str:
    """Return the pattern of a module, or of all parameters below it, whose name may be written from a dot on.

    The number of a chunk and the wrappers before the name, which a plan does not know, are left out.
    """
    name = re.sub(r"^(?:\d+:)?(?:module\.)*", "", text)
    if not name:
        return "**" if below else "root"
    return f"re:(^|\\.){re.escape(name)}" + (r"(\.|$)" if below else "$")


def _collectives(out: Translation, section: object) -> Any:
    wishes = out.section(section, "cc_distribution")
    if not wishes.get("enable"):
        return False
    out.check_keys(wishes, {"enable", "cc_codeline", "cc_pre_hook", "cc_log_only"}, "cc_distribution.")
    if wishes.get("cc_codeline"):
        out.note("cc_distribution.cc_codeline", "the collectives of every line of code are watched")
    if wishes.get("cc_log_only"):
        out.note("cc_distribution.cc_log_only", "the training is not stopped: the calls stand in the log with their groups")
    return True


def _features(out: Translation, targets: object) -> dict[str, Any]:
    """Return the features that hooks of that tool work out; an empty list means every weight, and none of the others."""
    section = out.section(targets, "l2_targets")
    for hook in section:
        if hook not in _HOOKS:
            raise out.refuse(f"l2_targets.{hook}", f"is not a hook{did_you_mean(hook, list(_HOOKS))}")
    features: dict[str, Any] = {}
    for hook, feature in _HOOKS.items():
        names = out.texts(section.get(hook, []), f"l2_targets.{hook}")
        patterns = [_pattern(name, below=feature == "weights") for name in names]
        if patterns:
            features[feature] = {"names": list(dict.fromkeys([*features.get(feature, {}).get("names", []), *patterns]))}
        elif feature == "weights":
            features[feature] = True
    return features


def _rules(out: Translation, alert: object) -> dict[str, Any]:
    section = out.section(alert, "alert")
    if section.get("dump"):
        out.fields["sinks"].append("msprobe_anomaly")
    rules: dict[str, Any] = {}
    for i, rule in enumerate(cast("Sequence[object]", section.get("rules") or ())):
        at = f"alert.rules[{i}]"
        given = out.section(rule, at)
        name, limit = given.get("rule_name"), out.section(given.get("args"), f"{at}.args").get("threshold")
        if name not in _RULES:
            raise out.refuse(at, f"{name!r} is not a rule{did_you_mean(str(name), list(_RULES))}")
        rules |= _RULES[name](limit, out.fields["statistics"])
    return rules


def _turbulence(limit: float | None, recorded: Sequence[str]) -> dict[str, Any]:
    judged = [name for name in ("norm", "mean") if name in recorded]
    return {"mean_deviation": {"statistics": judged, **({} if limit is None else {"threshold": limit})}} if judged else {}


def _nan(limit: float | None, recorded: Sequence[str]) -> dict[str, Any]:
    judged = [name for name in recorded if name not in ("nan", "zero")]
    return {"nonfinite": True, **({} if limit is None else {"threshold": {"limit": limit, "statistics": judged}})}


_RULES: dict[Any, Callable[[float | None, Sequence[str]], dict[str, Any]]] = {
    "AnomalyTurbulence": _turbulence,
    "AnomalyNan": _nan,
}
