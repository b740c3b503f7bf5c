"""The sentence that a person would say about two runs, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.config_check.compare.verdicts import LEVELS, Check, Finding

_LONGEST = 4  # causes in the first line
_ORDER = ("hyperparameters", "packages", "environment", "randomness", "weights", "dataset")


def causes_and_consequences(checks: Sequence[Check]) -> tuple[list[Finding], list[Finding]]:
    """Divide findings into those that explain, gravest first, and those that are explained by another; notes are neither."""
    ordered = sorted(checks, key=lambda c: _ORDER.index(c.name))
    findings = [f for check in ordered for f in check.findings if f.level != "note"]
    unique: list[Finding] = []
    for finding in findings:
        if not any(f.topic == finding.topic and _value_part(f) == _value_part(finding) for f in unique):
            unique.append(finding)
    causes = [f for f in unique if not any(_explains(other, f) for other in unique)]
    causes.sort(key=lambda f: -LEVELS.index(f.level))
    said: list[Finding] = []
    for cause in causes:
        if not any(s.topic == cause.topic and cause.topic.startswith(("setting ", "key ", "random seed")) for s in said):
            said.append(cause)
    return said, [f for f in unique if f not in causes]


def _value_part(finding: Finding) -> str:
    """Return what a finding says without where: the same setting in two sources is said once."""
    return (
        finding.text.partition(": ")[2].partition(" on ")[0] if finding.topic.startswith(("setting ", "key ")) else finding.text
    )


def _explains(cause: Finding, effect: Finding) -> bool:
    if (
        cause is effect
        or cause.topic == effect.topic
        or cause.topic.startswith("missing")
        or cause.topic.startswith("captured")
    ):
        return False
    return any(cause.topic.startswith(prefix) for prefix in effect.explained_by)


def first_line(checks: Sequence[Check]) -> tuple[str, str]:
    """Return the sentence, and a second one about what follows (or an empty text)."""
    causes, consequences = causes_and_consequences(checks)
    if not causes:
        not_compared = [check.name for check in checks if not check.compared]
        if len(not_compared) == len(checks):
            return "nothing could be compared", ""
        rest = f" ({', '.join(not_compared)} not captured)" if not_compared else ""
        return f"no difference found: everything that was captured is the same{rest}", ""
    sentence = "; ".join(f.text for f in causes[:_LONGEST])
    if len(causes) > _LONGEST:
        sentence += f"; and {len(causes) - _LONGEST} more"
    follows = "; ".join(f.text for f in consequences[:_LONGEST])
    return sentence, f"what follows: {follows}" if follows else ""
