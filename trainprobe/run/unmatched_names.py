"""Names that a plan selects and that the model does not have."""

from __future__ import annotations

from collections.abc import Iterator

from trainprobe.engine.core.flat_parameters import FLAT
from trainprobe.engine.core.unmatched import Unmatched
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import Names
from trainprobe.run.schedules import Parts

MONITORED = ("activations", "activation_gradients", "parameters", "gradients", "optimizer_state", "update")  # by name


def unmatched_names(plan: Plan, parts: Parts) -> Iterator[Unmatched]:
    """Yield the selections of a plan, each with its patterns that match nothing in the model that the taps know."""
    modules = [info.name for info in parts.naming.known.values()]
    parameters = list(parts.naming.parameter_names.values())
    if plan.level in ("L0", "mix"):
        for field, names in (("modules", modules), ("parameters", parameters)):
            yield Unmatched(field, plan.unmatched(names, field), must=True)
    flat = any(name.endswith(FLAT) for name in parameters)  # the monitor names what they are made of
    for kind in MONITORED if parts.monitor is not None else ():
        collect = getattr(parts.monitor, kind)
        of_modules = kind.startswith("activation")
        if collect.on and (of_modules or not flat):
            names = modules if of_modules else parameters
            yield Unmatched(f"monitor.{kind}.names", Names(collect.names).unmatched(names), must=False)
