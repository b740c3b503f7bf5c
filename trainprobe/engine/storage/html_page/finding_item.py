"""A finding as HTML: an item of the list on the page of a run, and what a notebook shows."""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.core.findings import place_in_words
from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.html_page.markup import Markup, element, joined, notebook_card

MOST = 8  # findings that a notebook shows


def finding_item(
    f: Finding, number: int, first: bool = False, on_map: bool = False, following: Sequence[Markup] = ()
) -> Markup:
    """Return the list item of a finding, which `#finding-NUMBER` leads to. following: items of what follows from it, folded."""
    where: list[Markup] = []
    if f.site:
        where.append(element("span", element("code", f.site.name), f" {f.site.slot}" if f.site.slot else ""))
    for label, value in (("measured ", f.measured), ("expected ", f.expected), ("noise floor ", f.floor)):
        if value is not None:
            where.append(element("span", label, element("code", value if isinstance(value, str) else f"{value:.4g}")))
    if on_map and f.step is not None:
        where.append(element("a", "show on the map", href="#map", class_="show", data_finding=str(number)))
    names = None
    if len(f.names) > 1:
        summary = element("summary", f"all {len(f.names)} names")
        names = element("details", summary, element("code", ", ".join(f.names)), class_="names")
    badge = element("span", "first", class_="first-badge") if first else None
    mark = element("div", element("a", f.rule, href=f"#finding-{number}"), element("span", place_in_words(f)), class_="mark")
    said = element("div", joined((badge, f.message)), class_="say")
    to_do = element("div", f.next, class_="next") if f.next else None
    under = None
    if following:
        summary = element(
            "summary", f"{counted(len(following), 'finding')} {'follows' if len(following) == 1 else 'follow'} from this"
        )
        under = element("details", summary, element("ol", *following), class_="following")
    body = element("div", said, element("div", *where, class_="where"), to_do, names, under)
    return element("li", mark, body, class_=f"finding {f.severity}", id=f"finding-{number}")


def findings_for_notebook(headline: str, found: Sequence[Finding]) -> Markup:
    """Return a sentence and the findings under it, as `_repr_html_` gives it to a notebook."""
    gravest = next((tone for tone in ("error", "warning") if any(f.severity == tone for f in found)), "info")
    items = [finding_item(f, i) for i, f in enumerate(found[:MOST], 1)]
    more = element("p", f"and {len(found) - MOST} more") if len(found) > MOST else None
    return notebook_card(headline, gravest, element("ol", *items) if items else None, more)
