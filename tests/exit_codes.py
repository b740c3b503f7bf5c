"""The page of exit codes, made from what each command says of its own: `python -m tests.exit_codes` writes it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import typer

from trainprobe.cli import VERBS, app_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exit_codes.md"
HEAD = """\
# Exit codes

    trainprobe judge probe_out --junit judge.xml || exit 1

| code | of every command |
|---|---|
| 0 | good |
| 1, 2 | an answer of the command, see below |
| 3 | no answer: a file, plan or folder cannot be used, or trainprobe itself failed |
| 64 | the command line cannot be understood |
| 130 | interrupted |
| 141 | the reader closed the pipe |

What each command says of its codes. Where it says nothing, 0 is the only answer.

"""


def leaves() -> Iterator[tuple[str, str]]:
    """Yield each command with the text of its help."""
    for verb in VERBS:
        command = typer.main.get_command(app_of(verb))
        inner = getattr(command, "commands", None)
        if inner:
            yield from ((f"{verb} {name}", one.help or "") for name, one in inner.items())
        else:
            yield verb, command.help or ""


def said(text: str) -> str:
    """Return what a help says of exit codes, "" for nothing."""
    found = re.search(r"[^.;]*\bexit codes?\b(.*?)(?=\.\s|\n\n|\Z)", " " + inspect.cleandoc(text), re.DOTALL | re.IGNORECASE)
    if found is None:
        return ""
    whole = " ".join(found[0].split())
    return re.sub(r"^Exit codes?[:,]? ?", "", whole).rstrip(".")


def page() -> str:
    """Return the page."""
    lines = [f"- `{name}`: {said(text)}" for name, text in leaves() if said(text)]
    wrapped = [
        textwrap.fill(line, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) for line in lines
    ]
    silent = ", ".join(f"`{name}`" for name, text in leaves() if not said(text))
    rest = textwrap.fill(f"0 alone: {silent}", 128, break_long_words=False, break_on_hyphens=False)
    return HEAD + "\n".join(wrapped) + f"\n\n{rest}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
