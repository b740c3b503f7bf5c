"""How a command ends that comes to one verdict: it is printed, and written as JSON and as a page where that is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.comparison.files import write_json
from trainprobe.comparison.terminal import show_verdict
from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.storage.html_page import make_page, markup, shared, write_text

Json = Annotated[Path | None, typer.Option(help="Write the answer as JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write the answer as one HTML page.")]


def answered(verdict: Verdict, command: str, of: str, json: Path | None, html: Path | None) -> int:
    """Print a verdict, write it where that is wanted, and return its exit code. of: what was judged. Raises OutputError."""
    show_verdict(verdict, Console(highlight=False))
    if json is not None:
        write_json(verdict.to_json(), json)
    if html is not None:
        head = markup.verdict_head(verdict.sentence, verdict.page_code, [of], [])
        written = {"head": markup.joined([head, markup.listed(verdict.details)])}
        write_text(html, make_page(verdict.sentence, command, [shared("foot.html")], {}, written=written), "--html")
    return verdict.code
