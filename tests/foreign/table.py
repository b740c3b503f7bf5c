"""Makes the table of docs/foreign_programs.md of what the last runs of the programs showed.

python -m tests.foreign.table             # after `make test-foreign-all`; a program that has not run keeps its row
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from tests.foreign.catalog import PROGRAMS, Program
from tests.foreign.running import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "foreign_programs.md"
BEGIN = "<!-- made by `python -m tests.foreign.table` of the programs that ran -->"
END = "<!-- end of the table -->"
HEAD = "Each program with its package, updates, recorded steps and bits; what it is; and what was found:\n"


def table(before: str = "") -> str:
    """Return the table of all programs. before: an earlier table, whose rows stay for programs that have no result now."""
    known = {
        entry.split()[1].rstrip(":"): entry.rstrip() for entry in re.split(r"^(?=- )", before, flags=re.M) if entry[:2] == "- "
    }
    rows = {p.name: _line(p, json.loads(_result(p).read_text())) for p in PROGRAMS if _result(p).is_file()}
    lines = [line for p in PROGRAMS if (line := rows.get(p.name, known.get(p.name)))]
    missing = [p.name for p in PROGRAMS if p.name not in rows and p.name not in known]
    text = "\n".join([HEAD, *lines])
    return text + (f"\n\nWithout a result in this table: {', '.join(missing)}." if missing else "")


def _result(program: Program) -> Path:
    return RESULTS / f"{program.name}.json"


def _line(program: Program, result: dict[str, Any]) -> str:
    bits = "equal" if not result["difference"] else "DIFFERENT"
    if result["codes"] != [0, 0]:
        bits = f"**the program ended with {result['codes'][1]}**"
    entry = f"{program.name}{' (quick)' if program.quick else ''}: `{program.entry}`"
    steps = f"{result['steps']}" + (f": {program.why}" if program.why else "")
    if result["steps"] != program.recorded:
        steps = f"**{result['steps']} of {program.recorded}**"
    cells = (entry, result["versions"], program.style, result["updates"], steps, bits, _findings(program, result))
    return entry_of(*map(str, cells))


def entry_of(entry: str, versions: str, style: str, updates: str, steps: str, bits: str, findings: str) -> str:
    """Return what the page says of one program."""
    facts = f"- {entry}; {versions}; updates: {updates}; steps recorded: {steps}; bits: {bits}."
    return "\n".join([_wrapped(facts), _wrapped(f"  What it is: {style}."), _wrapped(f"  Findings: {findings}.")])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _findings(program: Program, result: dict[str, Any]) -> str:
    """List each rule that found something: with its reason where that is true, marked where it is not."""
    found: dict[str, str] = {}
    for rule, severity, message in result["findings"]:
        reason = next((why for name, words, why in program.findings if name == rule and words in message), None)
        found.setdefault(rule, f"`{rule}`: {reason}" if reason else f"**false: `{rule}` ({severity})**")
    text = "; ".join(found.values()) or "none"
    return f"{text}. Not right yet: {program.amiss}" if program.amiss else text


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    earlier, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(earlier)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
