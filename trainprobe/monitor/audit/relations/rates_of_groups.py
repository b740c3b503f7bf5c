"""Parameter groups that were made to learn at different rates do so.

Two relations for the groups of an optimizer, without tolerance:

- Groups whose rates differed when the run began do not all have one rate above 0. Reported if they have at each of the first
  two audited steps.
- A group may hold a number that is named as a factor of the rate (`lr_mult`, `lr_scale` …), is not 1, and is unknown to
  the class of the optimizer. It does not have the rate of a group without this factor, or with another one. Reported after four
  audited steps.

Reported as warnings: a schedule may separate the rates later.
Usually caused by a schedule that writes one rate into all groups, or by an optimizer that keeps the factor and ignores it.
"""

from __future__ import annotations

import re

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import ParameterGroup, UpdateCounts, UsedGroups

COST = frozenset({"host"})
OBSERVERS = frozenset({"parameter_groups", "updates"})
STAGE = "rate"
PYTORCH_ONLY = "what a parameter group was made with is known of torch's optimizers"
_FACTOR = re.compile(r"(lr|rate)_?(mult|scale|factor|ratio|coef)|(mult|scale|factor|ratio|coef)\w*_(lr|rate)")
_LOOKS = {"overwritten": 2, "unread": 4}
Wrong = dict[str, tuple[str, str, ParameterGroup]]


def remember(evidence: Evidence) -> dict[str, int]:
    """Return at how many audited steps in a row each violation was seen; "looks": how many there were with an update."""
    known: dict[str, int] = evidence.remembered("rates_of_groups", {})
    if not evidence.of(UpdateCounts).updates:
        return known
    return {name: known.get(name, 0) + 1 for name in ("looks", *_wrong(evidence))}


def check(evidence: Evidence) -> list[Finding]:
    """Find rates that are alike and should not be."""
    seen = remember(evidence)
    for name, (text, hint, group) in _wrong(evidence).items():
        if seen.get(name, 0) < _LOOKS[name] or (name == "overwritten" and seen["looks"] > seen[name]):
            continue
        rate = group.options.get("lr")
        return [
            evidence.found(
                text, "lr", next=hint, measured=str(rate), expected="different rates", kind="scalar", names=sorted(group.names)
            )
        ]
    return []


def _wrong(evidence: Evidence) -> Wrong:
    """Return each violation of a step: what is to be told, what to do, and the first group."""
    found: Wrong = {}
    groups = [group for group in evidence.of(UsedGroups).groups if isinstance(group.options.get("lr"), int | float)]
    made, rates = [group.made for group in groups], [float(group.options["lr"]) for group in groups]  # pyright: ignore[reportArgumentType]
    if len(set(made)) > 1 and all(rate == rate for rate in made) and len(set(rates)) == 1 and rates[0] > 0:
        listed = ", ".join(f"{rate:.4g}" for rate in made[:4])
        text = (
            f"all {len(groups)} parameter groups learn at the rate {rates[0]:.4g}, though they were made with {listed}: "
            "the rates of the groups were overwritten before the first update"
        )
        found["overwritten"] = text, "multiply the rate of each group by the factor of the schedule", groups[0]
    for group in groups:
        factor = next((key for key in sorted(group.own) if _FACTOR.search(key) and group.options.get(key, 1) != 1), None)
        alike = [
            o
            for o in groups
            if factor and o.options["lr"] == group.options["lr"] and o.options.get(factor) != group.options[factor]
        ]
        if factor is not None and alike:
            text = (
                f"the parameter group of {and_more(sorted(group.names))} has {factor} {group.options[factor]:.4g}, which the "
                f"optimizer does not read: it learns at the rate {group.options['lr']:.4g}, as one without it does"
            )
            found["unread"] = text, f"multiply the lr of the group by {factor} when the optimizer is made", group
    return found
