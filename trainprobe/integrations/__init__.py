"""One thin file a framework: it maps the framework's events to the probe's verbs and tells where tensors are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainprobe.monitor.audit.relations import relation_names

if TYPE_CHECKING:
    from trainprobe.watching import Probe

DUMPED = {"statistics": "statistics", "tensor": "values"}
KINDS = ("gradients", "parameters", "optimizer_state", "activations", "activation_gradients", "scalars")


def announce(probe: Probe) -> None:
    """Print one line on rank 0: what is watched, where it is written and what it costs."""
    if probe.place.rank == 0 and probe.console.on:
        probe.console.line(describe(probe))


def describe(probe: Probe) -> str:
    """Return that line."""
    plan, monitor, audit = probe.plan, probe.monitor_plan, probe.audit
    dumps = "" if plan.level == "off" else f"a dump of {plan.level} with {DUMPED[plan.task]} of {_steps(plan.step)}"
    watched = [dumps] if dumps else []
    if monitor is not None:
        kinds = [kind.replace("_", " ") for kind in KINDS if getattr(monitor, kind).on]
        watched.append(f"{_joined(kinds) or 'nothing'} at {_steps(monitor.step)}")
    watched += ["the audit"] if audit is not None else []
    watched += [words for program in plan.programs.values() if (words := getattr(program, "WATCHES", ""))]
    if not watched:
        return "nothing is recorded or judged, as the plan says"
    count = len(set(probe.taps.naming.parameter_names.values()))
    what = f"{'; '.join(watched)} ({count} parameters on this rank)"
    return "; ".join(filter(None, (f"watching {what}", f"writing to {plan.output}", _costs(probe))))


def _costs(probe: Probe) -> str:
    """Say what a step costs, from a timing on this machine; where parameters cannot be read, in words."""
    from trainprobe.integrations.expected_cost import expected

    monitor, audit = probe.monitor_plan, probe.audit
    if monitor is None and audit is None:
        return "a dumped step costs one pass over each tensor that is dumped" if probe.plan.level != "off" else ""
    costs = probe.guard.run(expected, probe) if "torch" in sys.modules else None
    if costs is None or not any(cost.bytes for cost in costs):
        return "a watched step costs one pass over each of these tensors and one transfer to the host"
    parts: list[str] = []
    if monitor is not None:
        more = " and a pass over what modules hand on" if monitor.activations.on or monitor.activation_gradients.on else ""
        parts.append(f"{costs[0]} for a watched step{more}")
    if audit is not None:
        every = min((e for name in relation_names() if (e := audit.plan.interval(name))), default=0)
        parts.append(f"{costs[1]} for the audit of {f'one of {every} steps' if every > 1 else 'each step'}")
    return f"it costs {' and '.join(parts)}{', dumps left out' * (probe.plan.level != 'off')}, as timed here at the start"


def _steps(steps: tuple[int | str, ...]) -> str:
    return "every step" if steps == ("all",) else f"step {', '.join(map(str, steps))}"


def _joined(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
