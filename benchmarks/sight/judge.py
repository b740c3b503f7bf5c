"""The judgement: found, named first, alarms on the twin."""

from __future__ import annotations

from typing import Any

from benchmarks.sight.case import Case
from benchmarks.sight.running import alarms


def place(finding: dict[str, Any]) -> str:
    """Return the name of a finding's site, or an empty string."""
    return finding["site"]["name"] if finding["site"] else ""


def told(finding: dict[str, Any]) -> str:
    """Return a finding in one line."""
    return f"{finding['rule']} (step {finding['step']}) {place(finding)}: {finding['message']}"


def judged(case: Case, bug: list[dict[str, Any]], twin: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the line of a case.

    new: warnings and errors that the twin has not too (the same rule at the same place). found: one of them, by the step that
    the case states, is of its kind. named: the first of all of them is of its kind and names its place.
    """
    known = {(finding["rule"], place(finding)) for finding in alarms(twin)}
    new = [finding for finding in alarms(bug) if (finding["rule"], place(finding)) not in known]
    in_time = [finding for finding in new if finding["step"] is None or finding["step"] <= case.by]
    found = any(case.in_kind(finding) for finding in in_time)
    return {
        "case": case.name,
        "class": case.number,
        "found": found,
        "named": found and case.in_kind(in_time[0]) and case.at_its_place(in_time[0]),
        "first": told(new[0]) if new else "",
        "new": [told(finding) for finding in new],
        "alarms": [told(finding) for finding in alarms(twin)],
    }
