"""The settings of the optimizer stay what they are.

Relation: a setting of a parameter group that was one value at three audited steps in a row keeps it: decay, betas, momentum,
ε and their like, but not the learning rate, which `learning_rate` judges. One that a schedule moves at each step is not
judged. Tolerance none. Told as a warning. Usually caused by a callback that sets all groups alike (norms and biases then
decay), or by settings of a configuration that are written over those of a checkpoint, with their order or their names mixed
up.
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, and_more
from trainprobe.monitor.audit.history import STEADY, settings_of

COST = frozenset({"host"})
EVERY = 10
STAGE = "rate"


def check(evidence: Evidence) -> list[Finding]:
    """Find settings that changed."""
    known, now = evidence.past.settings, settings_of(evidence)
    if {i for i, _ in known} != {i for i, _ in now}:
        return []  # groups came or went: their numbers tell nothing
    changed = [key for key, value in now.items() if key in known and known[key][1] >= STEADY and known[key][0] != value]
    if not changed:
        return []
    group, setting = changed[0]
    names = sorted(evidence.facts.groups[group].names)
    was, value = known[changed[0]][0], now[changed[0]]
    whose = f" ({and_more(names)})" if names else ""
    text = f"the {setting} of parameter group {group}{whose} was {was} at each audited step before and is {value} now"
    if len(changed) > 1:
        text += f"; {len(changed) - 1} more changed"
    return [
        evidence.finding(
            "settings",
            text,
            setting,
            measured=str(value),
            expected=str(was),
            kind="scalar",
            severity="warning",
            next="look for what writes to optimizer.param_groups behind the schedule",
        )
    ]
