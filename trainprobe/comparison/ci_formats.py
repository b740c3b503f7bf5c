"""What a pipeline shows of an answer: `--junit FILE` writes a JUnit file, `--github` prints annotations of GitHub Actions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from xml.etree import ElementTree

import typer

from trainprobe.comparison.files import writing

Junit = Annotated[
    Path | None, typer.Option("--junit", help="write the answer as a JUnit file here", rich_help_panel="Pipelines")
]
Github = Annotated[
    bool, typer.Option("--github", help="print the answer as annotations of GitHub Actions", rich_help_panel="Pipelines")
]

MOST = 10  # annotations of a step that GitHub shows
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COMMANDS = {"failure": "error", "error": "error", "passed": "notice"}
Outcome = Literal["passed", "failure", "error"]


class PipelineCase(NamedTuple):
    """One test of the pipeline. outcome: error where there is no answer. details: further lines."""

    name: str
    outcome: Outcome
    message: str
    details: Sequence[str] = ()


def case_of(name: str, code: int, sentence: str, details: Sequence[str] = (), passes: int = 1) -> PipelineCase:
    """Return the case of an exit code. passes: the highest one that is good; 3 is no answer."""
    return PipelineCase(
        name,
        "passed" if code <= passes else "error" if code == 3 else "failure",
        sentence,
        [d for d in details if d != sentence],
    )


def tell(verb: str, cases: Iterable[PipelineCase], junit: Path | None, github: bool) -> None:
    """Write and print what was asked for. Raises OutputError where the file cannot be written.

    Annotations go to standard error, where a pipeline reads them as well, so that `--json` stays JSON.
    """
    cases = list(cases)
    if junit is not None:
        with writing(junit):
            junit.write_bytes(_junit(verb, cases))
    for case in cases[:MOST] if github else ():
        text = "\n".join((case.message, *case.details))
        title = _escaped(f"trainprobe {verb}: {case.name}").replace(":", "%3A").replace(",", "%2C")
        typer.echo(f"::{_COMMANDS[case.outcome]} title={title}::{_escaped(text)}", err=True)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _junit(verb: str, cases: Sequence[PipelineCase]) -> bytes:
    counts = {kind: str(sum(case.outcome == word for case in cases)) for kind, word in _PLURALS.items()}
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", {"name": f"trainprobe {verb}", "tests": str(len(cases)), **counts})
    for case in cases:
        at = ElementTree.SubElement(suite, "testcase", {"classname": f"trainprobe.{verb}", "name": _clean(case.name)})
        text = _clean("\n".join((case.message, *case.details)))
        if case.outcome == "passed":
            ElementTree.SubElement(at, "system-out").text = text
        else:
            ElementTree.SubElement(at, case.outcome, {"message": _clean(case.message)}).text = text
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


_PLURALS = {"failures": "failure", "errors": "error"}


def _clean(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return _NO_XML.sub("�", text)
