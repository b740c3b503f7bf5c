"""Build the site of these pages: `make docs`. The order of the pages is that of index.md."""

from __future__ import annotations

import re

import trainprobe

project = "trainprobe"
version = release = trainprobe.__version__
copyright = "the authors of trainprobe"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
default_role = "code"
nitpicky = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# types of frameworks, and the private ones in public signatures, have no page here
nitpick_ignore_regex = [("py:.*", r".*")]

html_theme = "furo"
html_title = f"trainprobe {version}"
html_show_sphinx = False
html_copy_source = False


def _pages_of_index(app, docname: str, source: list[str]) -> None:
    """Append to the index the tree of pages that Sphinx wants: each section's pages in the order in which it links them."""
    if docname != "index":
        return
    told: set[str] = set()
    for section in re.split(r"^## ", source[0], flags=re.M):
        pages = [page for page in dict.fromkeys(re.findall(r"\]\(([\w/]+)\.md", section)) if page not in told]
        told.update(pages)
        caption = section.splitlines()[0].lstrip("# ") if not section.startswith("#") else "Start"
        source[0] += "\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```\n"


def _examples(app, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Show the indented blocks of a docstring as code."""
    for at in range(len(lines) - 1, 0, -1):
        if lines[at].startswith("    ") and not lines[at - 1]:
            lines[at:at] = ["::", ""]


def setup(app) -> None:
    """Take part in the build, as Sphinx calls it."""
    app.connect("autodoc-process-docstring", _examples)
    app.connect("source-read", _pages_of_index)
