"""How many bugs the default plan sees, by class.

python -m benchmarks.sight                                # all cases, then all healthy loops
python -m benchmarks.sight --only ratio_always_one --out lines.json
python -m benchmarks.sight --healthy                      # the healthy loops alone
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.sight.case import CLASSES, Case
from benchmarks.sight.catalogue import CASES
from benchmarks.sight.further_forms import HEALTHY
from benchmarks.sight.judge import judged, told
from benchmarks.sight.running import alarms, run


class Known:
    """What earlier runs into one folder have found, by name: a bench that was stopped goes on behind it."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def findings(self, program: Any, *bug: str, ranks: int = 1) -> list[dict[str, Any]]:
        """Return the findings of a program, which runs unless they are known."""
        file = self._folder and self._folder / f"{program.__module__}.{program.__name__}.{'.'.join(bug)}.json"
        if file and file.exists():
            return json.loads(file.read_text())
        found = run(program, *bug, ranks=ranks)
        if file:
            file.write_text(json.dumps(found))
        return found


def lines_of(cases: list[Case], known: Known) -> list[dict[str, Any]]:
    """Run cases and their twins, and print and return a line for each; twins of one program run once."""
    twins: dict[Any, list[dict[str, Any]]] = {}
    lines = []
    for case in cases:
        if case.program not in twins:
            twins[case.program] = known.findings(case.program, "", ranks=case.ranks)
        line = judged(case, known.findings(case.program, case.name, ranks=case.ranks), twins[case.program])
        words = "found" if line["found"] else "MISSED", "named" if line["named"] else "-", len(line["alarms"])
        print(f"{case.number:2} {case.name:32} {words[0]:7} {words[1]:6} {words[2]:2}  {line['first'][:110]}", flush=True)
        lines.append(line)
    return lines


def loops_of(names: list[str], known: Known) -> dict[str, list[str]]:
    """Run healthy loops, and print and return the alarms of each."""
    told_of = {}
    for name in names:
        told_of[name] = [told(finding) for finding in alarms(known.findings(HEALTHY[name]))]
        print(f"   {name:32} {len(told_of[name])} alarms  {'; '.join(told_of[name])[:150]}", flush=True)
    return told_of


def table(lines: list[dict[str, Any]]) -> str:
    """Return the lines by class, as a table in Markdown."""
    rows = ["| class | bugs | found | named first |", "|---|---|---|---|"]
    for number, name in CLASSES.items():
        own = [line for line in lines if line["class"] == number]
        found, named = sum(line["found"] for line in own), sum(line["named"] for line in own)
        rows += [f"| {number} {name} | {len(own)} | {found} | {named} |"] if own else []
    found, named = sum(line["found"] for line in lines), sum(line["named"] for line in lines)
    return "\n".join([*rows, f"| **all** | {len(lines)} | {found} | {named} |"])


def main(
    only: Annotated[list[str] | None, typer.Option(help="names of cases or healthy loops")] = None,
    healthy: Annotated[bool, typer.Option(help="the healthy loops alone")] = False,
    known: Annotated[Path | None, typer.Option(help="keep what each run has found in this folder, and go on behind it")] = None,
    out: Annotated[Path | None, typer.Option(help="write the lines to this file, as JSON")] = None,
) -> None:
    """Print a line a case and a line a healthy loop, and a table by class."""
    cases = [case for case in CASES if not healthy and (not only or case.name in only)]
    lines, loops = lines_of(cases, Known(known)), loops_of([name for name in HEALTHY if not only or name in only], Known(known))
    if out:
        out.write_text(json.dumps({"cases": lines, "healthy": loops}, indent=1))
    print(table(lines))
    twins = {case.program.__name__: line["alarms"] for case, line in zip(cases, lines, strict=True)}
    print(f"{sum(bool(told_of) for told_of in twins.values())} of {len(twins)} healthy twins have an alarm")
    print(f"{sum(bool(told_of) for told_of in loops.values())} of {len(loops)} healthy loops have an alarm")


if __name__ == "__main__":
    typer.run(main)
