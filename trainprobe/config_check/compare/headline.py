"""The sentence that a person would say about two runs, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.config_check.compare.verdicts import LEVELS, Check, PackFinding

_LONGEST = 4  # causes in the first line
_ORDER = ("hyperparameters", "packages", "environment", "randomness", "weights", "dataset")
# topics of what a run did, not of why, each explained by those before it
_DEPTHS = {"dataset": 0, "random calls": 0, "random counts": 1, "random state": 2, "weights": 3}
_EFFECTS = tuple(_DEPTHS)
_ONCE = ("setting ", "key ", "random seed")  # beginnings of topics of which one finding is enough
CODE = "code"


def causes_and_consequences(checks: Sequence[Check]) -> tuple[list[PackFinding], list[PackFinding]]:
    """Divide findings into those that explain, gravest first, and those that are explained by another; notes are neither.

    A note that is a suspect is among the causes where one of them is only an effect.
    """
    ordered = sorted(checks, key=lambda c: _ORDER.index(c.name))
    unique = _unique([f for check in ordered for f in check.findings if f.level != "note"])
    if any(_is_unexplained_effect(f, unique) for f in unique):
        unique += [f for check in ordered for f in check.findings if f.suspect and _is_suspected(f, unique)]
    causes = [f for f in unique if not _is_explained(f, unique)]
    causes.sort(key=lambda f: -LEVELS.index(f.level))
    reported: list[PackFinding] = []
    for cause in causes:
        if not any(s.topic == cause.topic and cause.topic.startswith(_ONCE) for s in reported):
            reported.append(cause)
    return reported, [f for f in unique if f not in causes]


def _unique(findings: Sequence[PackFinding]) -> list[PackFinding]:
    unique: list[PackFinding] = []
    for finding in findings:
        if not any(f.topic == finding.topic and _value_part(f) == _value_part(finding) for f in unique):
            unique.append(finding)
    return unique


def _value_part(finding: PackFinding) -> str:
    """Return what a finding says without where: the same setting in two sources is said once."""
    return (
        finding.text.partition(": ")[2].partition(" on ")[0] if finding.topic.startswith(("setting ", "key ")) else finding.text
    )


def _is_unexplained_effect(finding: PackFinding, all_of_them: Sequence[PackFinding]) -> bool:
    """Tell whether an effect has no cause but, perhaps, that the code differs somewhere."""
    others = [f for f in all_of_them if f.topic != CODE]
    return finding.topic.startswith(_EFFECTS) and not _is_explained(finding, others)


def _is_suspected(suspect: PackFinding, found: Sequence[PackFinding]) -> bool:
    """Tell whether a suspect is one of an effect that is there: a setting of what names it, other variables of any."""
    return any(f.topic.startswith(_EFFECTS) and (suspect.topic == "variables" or _explains(suspect, f)) for f in found)


def _is_explained(effect: PackFinding, all_of_them: Sequence[PackFinding]) -> bool:
    return any(_explains(other, effect) for other in all_of_them)


def _explains(cause: PackFinding, effect: PackFinding) -> bool:
    if (
        cause is effect
        or (cause.topic.startswith("package") and LEVELS.index(cause.level) < LEVELS.index(effect.level))
        or cause.topic == effect.topic
        or cause.topic.startswith("missing")
        or cause.topic.startswith("captured")
    ):
        return False
    return any(cause.topic.startswith(prefix) if prefix else _depth(cause) < _depth(effect) for prefix in effect.explained_by)


def _depth(finding: PackFinding) -> int:
    """Return how far down an effect stands: data, then random calls, then their states, then weights; -1 for what is none."""
    return next((depth for topic, depth in _DEPTHS.items() if finding.topic.startswith(topic)), -1)


def headline(checks: Sequence[Check]) -> tuple[str, str]:
    """Return the sentence, and a second one about what follows (or an empty text)."""
    causes, consequences = causes_and_consequences(checks)
    if not causes:
        return _nothing_found(checks), ""
    sentence = "; ".join(f.text for f in causes[:_LONGEST])
    if len(causes) > _LONGEST:
        sentence += f"; and {len(causes) - _LONGEST} more"
    follows = "; ".join(f.text for f in [f for f in consequences if f.topic != CODE][:_LONGEST])
    code_differs = "; ".join(f.text for f in consequences if f.topic == CODE)
    parts = [f"what follows: {follows}" if follows else "", f"besides: {code_differs}" if code_differs else ""]
    return sentence, "; ".join(filter(None, parts))


def _nothing_found(checks: Sequence[Check]) -> str:
    """Say that nothing differs, and what was not compared or is known by a hash alone."""
    not_compared = [check.name for check in checks if not check.compared]
    if len(not_compared) == len(checks):
        return "nothing could be compared"
    held = any(check.findings for check in checks if not check.compared)
    rest = f" ({', '.join(not_compared)} not {'compared' if held else 'captured'})" if not_compared else ""
    unknown = [f.text for check in checks for f in check.findings if f.topic == "variables"]
    if unknown:
        return f"no difference found in what was captured{rest}; {unknown[0]}"
    return f"no difference found: everything that was captured is the same{rest}"
