"""The JSON of the second monitor (`TrainerMonitorV2` of release 26.2): a section `monitors` with one section a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.engine.plan.legacy.monitor import WITHOUT_END, statistics, steps
from trainprobe.engine.plan.legacy.translation import Translation, literal

_KNOWN = {
    *("framework", "output_dir", "format", "async_write", "rank", "start_step", "stop_step", "step_interval"),
    *("step_count_per_record", "patch_optimizer_step", "collect_times", "monitors"),
}
_KINDS = {
    "module": {"targets"},
    "weight_grad": {"monitor_mbs_grad", "micro_batch_number"},
    "optimizer": {"mv_distribution"},
    "param": {"param_distribution"},
    "cc": {"cc_codeline", "cc_pre_hook", "cc_log_only", "module_ranks"},
}
_DEFAULT = ["min", "max", "mean", "norm", "nans"]


def is_dialect(fields: Mapping[str, Any]) -> bool:
    """Tell whether these keys are the second monitor's."""
    return "monitors" in fields


def translate(config: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a plan and the notes; PlanError names what cannot be carried over."""
    out = Translation(origin)
    out.check_keys(config, _KNOWN)
    monitors = out.section(config["monitors"], "monitors")
    out.check_keys(monitors, set(_KINDS), "monitors.")
    on: dict[str, Mapping[str, Any]] = {}
    for kind, more in _KINDS.items():
        section = out.section(monitors.get(kind), f"monitors.{kind}")
        out.check_keys(section, {"enabled", "ops", "eps"} | more, f"monitors.{kind}.")
        if kind in monitors and section.get("enabled", kind == "module"):
            on[kind] = section
    out.fields |= {"output": config.get("output_dir", "./"), "level": "off"}
    out.fields |= {"sinks": ["parquet", "msprobe_second_csv"], "csv_steps": out.whole(config, "step_count_per_record", 1, 1)}
    out.fields["statistics"] = _statistics(out, on)
    if config.get("rank") not in (None, []):
        out.fields["rank"] = config["rank"]
    out.fields["monitor"] = {"step": _steps(out, config), **_kinds(out, on)}
    return out.fields, tuple(out.notes)


def _statistics(out: Translation, on: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what all monitors record together."""
    each = {kind: statistics(out, section.get("ops", _DEFAULT), f"monitors.{kind}.ops") for kind, section in on.items()}
    together = list(dict.fromkeys(name for names in each.values() for name in names))
    if any(set(names) != set(together) for names in each.values()):
        out.note("monitors", f"{', '.join(together)} are recorded for all kinds")
    return together or ["norm"]


def _steps(out: Translation, config: Mapping[str, Any]) -> str:
    first, interval = out.whole(config, "start_step", 0, 0), out.whole(config, "step_interval", 1, 1)
    times = out.whole(config, "collect_times", WITHOUT_END, 1)
    if config.get("stop_step") is not None:
        stop = out.whole(config, "stop_step", first + interval * WITHOUT_END, first)
        times = min(times, -(-(stop - first) // interval))
    return steps(first, interval, times)


def _kinds(out: Translation, on: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    targets = out.texts(on.get("module", {}).get("targets", []), "monitors.module.targets")
    modules = {"names": [f"**{literal(name)}**" for name in targets] or ["**"]} if "module" in on else False
    gradients = on.get("weight_grad")
    return {
        "activations": modules,
        "activation_gradients": modules,
        "parameters": on.get("param", {"param_distribution": False}).get("param_distribution", True),
        "gradients": {"unreduced": True, "per_micro": bool(gradients.get("monitor_mbs_grad"))}
        if gradients is not None
        else False,
        "optimizer_state": on.get("optimizer", {"mv_distribution": False}).get("mv_distribution", True),
        "collectives": "cc" in on,
    }
