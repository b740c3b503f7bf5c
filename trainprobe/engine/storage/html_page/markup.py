"""HTML that a page holds before its script runs, so that it can be read without one: elements, headings and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from trainprobe.engine.core.words import counted

_TONES = {"error": "#c21f45", "warning": "#c98613", "info": "#7f9fc4", "good": "#74ab90"}


class Markup(str):
    """Text that is HTML already; any other text is escaped where it is put into an element."""

    __slots__ = ()


def joined(children: Iterable[str | None]) -> Markup:
    """Return elements and texts one after the other; None is left out."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child is not None))


def element(tag: str, *children: str | None, **attributes: str | None) -> Markup:
    """Return an element. attributes: `class_` is `class`, `aria_label` is `aria-label`; one that is None is left out."""
    given = "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(v)}"' for k, v in attributes.items() if v is not None)
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def verdict(name: str) -> Markup:
    """Return what was found, as a word beside a dot of its colour."""
    return element("span", name, class_=f"verdict v-{name.replace(' ', '-')}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str | None] = (), **attributes: str) -> Markup:
    """Return a table. rows: their cells. kinds: the class of the cells of each column (see page.css), for all or for none.

    attributes: `class_="stacks"` puts the cells of a row one below the other on a phone, each beside its column's name."""
    kinds = kinds or [None] * len(columns)
    head = (element("th", name, scope="col", class_=kind) for name, kind in zip(columns, kinds, strict=True))
    labels = columns if attributes.get("class_") == "stacks" else [None] * len(columns)
    body = (
        element("tr", *(element("td", c, class_=k, data_label=name) for c, k, name in zip(row, kinds, labels, strict=True)))
        for row in rows
    )
    return element("table", element("thead", element("tr", *head)), element("tbody", *body), **attributes)


def listed(lines: Iterable[str], **attributes: str) -> Markup:
    """Return an unordered list; empty where there are no lines."""
    return element("ul", *(element("li", line) for line in lines), **attributes)


def run_head(title: str, meta: Iterable[tuple[str, str]]) -> Markup:
    """Return the heading of a run: its name, and facts about it."""
    facts = (element("div", element("dt", name), element("dd", value)) for name, value in meta)
    return element("header", element("h1", title, id="title"), element("dl", *facts, id="meta"))


def verdict_head(sentence: str, code: int | str, paths: Sequence[str], remarks: Sequence[str]) -> Markup:
    """Return the heading of a comparison: what was found, of what, and what else is to be said."""
    named = (element("span", element("b", "AB"[i]) if len(paths) > 1 else None, path) for i, path in enumerate(paths))
    return element(
        "header",
        element("h1", sentence, id="sentence", class_=f"v-code{code}"),
        element("p", *named, id="paths"),
        _folded(remarks, id="details"),
        id="head",
    )


def notebook_card(headline: str, tone: str, *below: Markup | None) -> Markup:
    """Return a sentence with what belongs to it, for a notebook, where the rules of page.css are not.

    tone: error, warning, info or good: the colour at its side.
    """
    style = f"border-left: 5px solid {_TONES[tone]}; padding-left: 12px"
    return element("div", element("strong", headline), *below, style=style, class_="trainprobe")


def verdict_for_notebook(sentence: str, code: int, remarks: Sequence[str]) -> Markup:
    """Return a verdict as `_repr_html_` gives it to a notebook. code: the command's: 0 good, 2 bad, others between."""
    return notebook_card(sentence, ("good", "good", "error", "warning")[code], _folded(remarks))


def _folded(remarks: Sequence[str], **attributes: str) -> Markup | None:
    """Return remarks behind their number; None where there are none."""
    summary = element("summary", counted(len(remarks), "remark"))
    return element("details", summary, listed(remarks), **attributes) if remarks else None
