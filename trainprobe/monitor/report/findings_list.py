"""The findings of a run as HTML that needs no script: causes first, notes last, the less important ones folded."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.html_page.finding_item import finding_item
from trainprobe.engine.storage.html_page.markup import Markup, element, listed
from trainprobe.monitor.report.run_view import RunView

MOST = 8  # findings that are not folded


def in_order_shown(found: Sequence[Finding]) -> list[Finding]:
    """Return findings with notes last."""
    return sorted(found, key=lambda f: f.severity == "info")


def first_offender(found: Sequence[Finding]) -> Finding | None:
    """Return the first finding at a step that is no note."""
    return next((f for f in found if f.step is not None and f.severity != "info"), None)


def findings_card(run: RunView, found: Sequence[Finding]) -> Markup:
    """Return the card with what was found. found: as `in_order_shown` returns them."""
    first, on_map = first_offender(found), bool(run.metrics)
    items = [finding_item(f, i, f is first, on_map) for i, f in enumerate(found, 1)]
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
