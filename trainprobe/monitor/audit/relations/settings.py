"""The settings of the optimizer stay what they are.

Relation: a setting of a parameter group that was one value at three audited steps in a row keeps it, and has it after a load as
it had it when it was saved: decay, betas, momentum, ε and their like, but not the learning rate, which `learning_rate` judges.
One that a schedule moves at each step is not judged. Tolerance none. Reported as a warning.
Usually caused by a callback that sets all groups to the same values (norms and biases then decay), or by settings of a
configuration that are written over those of a checkpoint, with their order or their names mixed up.
"""

from __future__ import annotations

from typing import Any

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.saves import Save, Saves
from trainprobe.monitor.audit.facts.updates import UsedGroups

COST = frozenset({"host"})
# saves are looked at where `saved_and_loaded` is checked
OBSERVERS = frozenset({"parameter_groups"})
STAGE = "rate"
STEADY = 3
_SETTINGS = frozenset(
    {"betas", "momentum", "weight_decay", "eps", "alpha", "dampening", "nesterov", "amsgrad", "rho", "maximize", "centered"}
)
Setting = tuple[int, str]  # parameter group, name


def check(evidence: Evidence) -> list[Finding]:
    """Find settings that changed."""
    now = _settings_of(evidence)
    if evidence.resumed is not None and evidence.of(Saves).saved:
        return _since_the_save(evidence, evidence.resumed, now)
    known = _known(evidence)
    if {i for i, _ in known} != {i for i, _ in now}:
        return []  # groups came or went: their numbers tell nothing
    changed = [key for key, value in now.items() if key in known and known[key][1] >= STEADY and known[key][0] != value]
    if not changed:
        return []
    return _finding(evidence, changed, known[changed[0]][0], now[changed[0]], "at each audited step before")


def remember(evidence: Evidence) -> dict[Setting, tuple[Any, int]]:
    """Return each setting, and at how many audited steps in a row it has been the same."""
    known = _known(evidence)
    if not evidence.of(UsedGroups).groups:
        return known
    now = _settings_of(evidence)
    return {key: (value, known[key][1] + 1 if known.get(key, (None, 0))[0] == value else 1) for key, value in now.items()}


def _known(evidence: Evidence) -> dict[Setting, tuple[Any, int]]:
    return evidence.remembered("settings", {})


def _settings_of(evidence: Evidence) -> dict[Setting, Any]:
    """Return the settings that schedulers of the rate leave as they are."""
    groups = enumerate(evidence.of(UsedGroups).groups)
    return {(i, name): value for i, group in groups for name, value in group.options.items() if name in _SETTINGS}


def _since_the_save(evidence: Evidence, saved: Save, now: dict[Setting, Any]) -> list[Finding]:
    """Compare with what was saved; a tuple comes back from a file as a list."""
    groups = {int(key.partition(" ")[0]) for key in saved.settings}
    if not groups or groups != set(range(len(evidence.of(UsedGroups).groups))):
        return []
    was = {key: saved.settings.get(f"{key[0]} {key[1]}") for key in now}
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in was.items()}
    changed = [key for key, value in now.items() if plain[key] is not None and plain[key] != value]
    when = f"when it was saved at step {saved.step}"
    return _finding(evidence, changed, plain[changed[0]], now[changed[0]], when) if changed else []


def _finding(evidence: Evidence, changed: list[Setting], was: Any, value: Any, when: str) -> list[Finding]:
    group, setting = changed[0]
    names = sorted(evidence.of(UsedGroups).groups[group].names)
    whose = f" ({and_more(names)})" if names else ""
    text = f"the {setting} of parameter group {group}{whose} was {was} {when} and is {value} now"
    if len(changed) > 1:
        text += f"; {len(changed) - 1} more changed"
    hint = "look for what writes to optimizer.param_groups after the schedule"
    return [evidence.found(text, setting, next=hint, measured=str(value), expected=str(was), kind="scalar", names=names)]
