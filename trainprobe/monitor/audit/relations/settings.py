"""The settings of the optimizer stay what they are.

Relation: a setting of a parameter group that was one value at three audited steps in a row keeps it, and has it after a load
as it had it when it was saved: decay, betas, momentum, ε and their like, but not the learning rate, which `learning_rate`
judges. One that a schedule moves at each step is not judged. Tolerance none. Told as a warning. Usually caused by a callback
that sets all groups alike (norms and biases then decay), or by settings of a configuration that are written over those of a
checkpoint, with their order or their names mixed up.
"""

from __future__ import annotations

from typing import Any

from trainprobe.engine.core.facts import SavedTensors
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, and_more
from trainprobe.monitor.audit.history import STEADY, settings_of

COST = frozenset({"host"})
EVERY = 10
STAGE = "rate"


def check(evidence: Evidence) -> list[Finding]:
    """Find settings that changed."""
    now = settings_of(evidence)
    if evidence.resumed is not None and evidence.facts.saved:
        return _since_the_save(evidence, evidence.resumed, now)
    known = evidence.past.settings
    if {i for i, _ in known} != {i for i, _ in now}:
        return []  # groups came or went: their numbers tell nothing
    changed = [key for key, value in now.items() if key in known and known[key][1] >= STEADY and known[key][0] != value]
    if not changed:
        return []
    return _finding(evidence, changed, known[changed[0]][0], now[changed[0]], "at each audited step before")


def _since_the_save(evidence: Evidence, saved: SavedTensors, now: dict[tuple[int, str], Any]) -> list[Finding]:
    """Compare with what was saved; a tuple comes back from a file as a list."""
    groups = {int(key.partition(" ")[0]) for key in saved.settings}
    if not groups or groups != set(range(len(evidence.facts.groups))):
        return []
    was = {key: saved.settings.get(f"{key[0]} {key[1]}") for key in now}
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in was.items()}
    changed = [key for key, value in now.items() if plain[key] is not None and plain[key] != value]
    when = f"when it was saved at step {saved.step}"
    return _finding(evidence, changed, plain[changed[0]], now[changed[0]], when) if changed else []


def _finding(evidence: Evidence, changed: list[tuple[int, str]], was: Any, value: Any, when: str) -> list[Finding]:
    group, setting = changed[0]
    names = sorted(evidence.facts.groups[group].names)
    whose = f" ({and_more(names)})" if names else ""
    text = f"the {setting} of parameter group {group}{whose} was {was} {when} and is {value} now"
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
            names=names,
        )
    ]
