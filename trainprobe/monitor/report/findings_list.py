"""The findings of a run as HTML that needs no script: causes first, notes last, the less important ones folded."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.html_page.finding_item import finding_item
from trainprobe.engine.storage.html_page.markup import Markup, element, listed
from trainprobe.monitor.report.run_view import RunView

MOST = 8  # findings that are not folded
_FOLLOW = {"ownership": ("movement", "frozen"), "trainable_set": ("movement", "frozen"), "movement": ("frozen",)}


def in_order_shown(found: Sequence[Finding]) -> list[Finding]:
    """Return findings with notes last, and each cause before what follows from it."""
    ordered = sorted(found, key=lambda f: f.severity == "info")
    return [finding for group in _groups(ordered) for finding in group]


def _groups(found: Sequence[Finding]) -> list[list[Finding]]:
    """Return causes, each with what follows from it behind it; a group is where the first of it was."""
    cause = [next((i for i, other in enumerate(found) if _follows(f, other)), at) for at, f in enumerate(found)]
    root = [cause[i] for i in cause]  # what follows from a consequence follows from its cause
    groups: dict[int, list[Finding]] = {at: [found[at]] for at in root}
    for i, at in enumerate(root):
        groups[at] += [found[i]] if i != at else []
    return list(groups.values())


def _follows(finding: Finding, cause: Finding) -> bool:
    """Tell whether a finding is a consequence of another: that the same parameters, or some of them, do not move."""
    if finding.rule not in _FOLLOW.get(cause.rule, ()):
        return False
    about = _names(finding)
    return bool(about) and about <= _names(cause)


def _names(finding: Finding) -> set[str]:
    return set(finding.names) or ({finding.site.name} if finding.site else set())


def first_offender(found: Sequence[Finding]) -> Finding | None:
    """Return the first finding at a step that is no note."""
    return next((f for f in found if f.step is not None and f.severity != "info"), None)


def findings_card(run: RunView, found: Sequence[Finding]) -> Markup:
    """Return the card with what was found. found: as `in_order_shown` returns them."""
    first, on_map = first_offender(found), bool(run.metrics)
    numbers = {id(f): i for i, f in enumerate(found, 1)}
    items = []
    for cause, *following in _groups(found):
        under = [finding_item(f, numbers[id(f)], f is first, on_map) for f in following]
        items.append(finding_item(cause, numbers[id(cause)], cause is first, on_map, under))
    body = element("ol", *items[:MOST], id="finding-list")
    if not found:
        none = f"{run.recorded}: no findings in these." if run.recorded else "No findings."
        body = element("p", none, class_=None if run.jump or run.recorded else "calm")
    summary = element("summary", f"{len(items) - MOST} more")
    more = element("details", summary, element("ol", *items[MOST:]), id="more-findings") if items[MOST:] else None
    jump = element("p", f"{run.jump}.", id="jump") if run.jump and all(f.severity == "info" for f in found) else None
    title = element("h2", "Findings", id="findings-title")
    notes = listed(run.notes, id="notes")
    return element("section", title, body, more, jump, notes, id="findings", class_="card", aria_labelledby="findings-title")
