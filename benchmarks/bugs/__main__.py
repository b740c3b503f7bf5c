"""What the audit finds of the published silent bugs: detected, after how many collected steps, located, false alarms, overhead.

python -m benchmarks.bugs
python -m benchmarks.bugs --held-out
python -m benchmarks.bugs --unseen
python -m benchmarks.bugs --unseen-again
python -m benchmarks.bugs --unseen-third
python -m benchmarks.bugs --unseen-fourth
python -m benchmarks.bugs --only "2 norm not reduced" --why
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.bugs.held_out import HELD_OUT
from benchmarks.bugs.published import PUBLISHED, Bug
from benchmarks.bugs.two_ranks import launch
from benchmarks.bugs.unseen import UNSEEN
from benchmarks.bugs.unseen_again import UNSEEN_AGAIN
from benchmarks.bugs.unseen_fourth import UNSEEN_FOURTH
from benchmarks.bugs.unseen_third import UNSEEN_THIRD
from trainprobe.engine.records import Finding, Site

ALARMS = ("warning", "error")


def judge(bug: Bug, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put what both ranks found of a bug and of its twin into one line; the first finding of the first rank counts."""
    ranks = [rank for rank in ranks if bug.name in rank]
    found = [_first(rank[bug.name]["bug"]["findings"]) for rank in ranks]
    firsts = sorted((f for f in found if f is not None), key=lambda f: f.step if f.step is not None else 1 << 30)
    begins = ranks[0][bug.name]["bug"]["begins"]
    first = firsts[0] if firsts else None
    steps = None if first is None or first.step is None else first.step - begins + 1
    alarms = [f for rank in ranks for f in rank[bug.name]["twin"]["findings"] if f["severity"] in ALARMS]
    bare, twin = (sum(rank[bug.name][kind]["seconds"] for rank in ranks) for kind in ("bare", "twin"))
    early = steps is not None and steps < 1
    return {
        "bug": bug.name,
        "detected": first is not None and not early and (steps or 0) <= bug.within,
        "steps": steps,
        "located": first is not None and bug.located(first),
        "named": "" if first is None else f"{first.rule}: {first.site.name if first.site else ''}",
        "alarms": len(alarms),
        "overhead": twin / bare,
        "why": [f["message"] for f in ranks[0][bug.name]["bug"]["findings"]] + [f"ALARM {f['message']}" for f in alarms],
    }


def _first(findings: list[dict[str, Any]]) -> Finding | None:
    for f in findings:
        if f["severity"] in ALARMS and f["rule"] != "probe":
            site = Site(*f["site"]) if f["site"] else None
            return Finding(f["rule"], f["severity"], f["message"], f["step"], None, site)
    return None


def main(
    held_out: Annotated[bool, typer.Option(help="the bugs that the detectors were not built against")] = False,
    unseen: Annotated[bool, typer.Option(help="bugs in loops of many styles, which declare nothing")] = False,
    unseen_again: Annotated[bool, typer.Option(help="a second set of those")] = False,
    unseen_third: Annotated[bool, typer.Option(help="a third set, in loops of further styles")] = False,
    unseen_fourth: Annotated[bool, typer.Option(help="a fourth set, with models of further kinds")] = False,
    only: Annotated[list[str] | None, typer.Option(help="names of bugs, as they are printed")] = None,
    why: Annotated[bool, typer.Option(help="print every finding too")] = False,
) -> None:
    """Print one line a bug; the exit code is 1 when the bar is missed."""
    sets = {
        HELD_OUT: held_out,
        UNSEEN: unseen,
        UNSEEN_AGAIN: unseen_again,
        UNSEEN_THIRD: unseen_third,
        UNSEEN_FOURTH: unseen_fourth,
    }
    chosen = next((bugs for bugs, asked in sets.items() if asked), PUBLISHED)
    bugs = [bug for bug in chosen if not only or bug.name in only]
    ranks = launch(bugs)
    lines = [judge(bug, ranks) for bug in bugs]
    print(f"{'bug':32} {'detected':9} {'steps':>5} {'located':8} {'alarms':>6} {'overhead':>8}  named first")
    for line in lines:
        words = ["yes" if line[key] else "NO" for key in ("detected", "located")]
        print(
            f"{line['bug']:32} {words[0]:9} {line['steps'] or '-'!s:>5} {words[1]:8} "
            f"{line['alarms']:>6} {line['overhead']:>8.2f}  {line['named']}"
        )
        for message in line["why"] if why else ():
            print(f"    {message}")
    detected, located = (sum(bool(line[key]) for line in lines) for key in ("detected", "located"))
    alarms = sum(line["alarms"] for line in lines)
    print(f"{detected} of {len(lines)} detected in time, {located} located, {alarms} false alarms")
    raise typer.Exit(0 if detected == len(lines) and located >= 0.8 * len(lines) and not alarms else 1)


if __name__ == "__main__":
    typer.run(main)
