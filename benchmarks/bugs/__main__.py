"""What the probe finds of silent bugs: found, at which step, named first, false alarms on the healthy twins.

python -m benchmarks.bugs --set open                        # under the default plan, as users run it
python -m benchmarks.bugs --set open --plan every-step      # with the audit at every step
python -m benchmarks.bugs --set unseen --later 48           # bugs of mid-run begin when some steps were audited
python -m benchmarks.bugs --set published --json lines.json
python -m benchmarks.bugs --set held-out --only "2 norm not reduced" --why
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.bugs.held_out import HELD_OUT
from benchmarks.bugs.open_bench import judge as open_bench
from benchmarks.bugs.open_bench.catalogue import OPEN
from benchmarks.bugs.published import PUBLISHED, Bug
from benchmarks.bugs.two_ranks import launch
from benchmarks.bugs.unseen import UNSEEN
from benchmarks.bugs.unseen_again import UNSEEN_AGAIN
from benchmarks.bugs.unseen_fourth import UNSEEN_FOURTH
from benchmarks.bugs.unseen_third import UNSEEN_THIRD
from trainprobe.engine.core.records import Finding, Site

ALARMS = ("warning", "error")
SETS: dict[str, tuple[Bug, ...]] = {
    "published": PUBLISHED,
    "held-out": HELD_OUT,
    "unseen": UNSEEN,
    "unseen-again": UNSEEN_AGAIN,
    "unseen-third": UNSEEN_THIRD,
    "unseen-fourth": UNSEEN_FOURTH,
}


def judge(bug: Bug, ranks: list[dict[str, Any]], whole_run: bool = False) -> dict[str, Any]:
    """Put what both ranks found of a bug and of its twin into one line; the first finding of the first rank counts.

    What the twin has too (the same rule at the same place) is a false alarm, and finds nothing.

    whole_run: an alarm at any step from the bug's first on is in time, as under a plan that audits some steps only.
    """
    ranks = [rank for rank in ranks if bug.name in rank]
    alarms = [f for rank in ranks for f in rank[bug.name]["twin"]["findings"] if f["severity"] in ALARMS]
    known = {_place(f) for f in alarms}
    found = [_first(f for f in rank[bug.name]["bug"]["findings"] if _place(f) not in known) for rank in ranks]
    firsts = sorted((f for f in found if f is not None), key=lambda f: f.step if f.step is not None else 1 << 30)
    begins = ranks[0][bug.name]["bug"]["begins"]
    first = firsts[0] if firsts else None
    steps = None if first is None or first.step is None else first.step - begins + 1
    twin, bare = (sum(rank[bug.name].get(kind, {}).get("seconds", 0.0) for rank in ranks) for kind in ("twin", "bare"))
    early = steps is not None and steps < 1
    detected = first is not None and not early and (whole_run or (steps or 0) <= bug.within)
    return {
        "bug": bug.name,
        "detected": detected,
        "steps": steps,
        "located": first is not None and bug.located(first),
        "named": "" if first is None else f"{first.rule}: {first.site.name if first.site else ''}",
        "alarms": len(alarms),
        "overhead": twin / bare if bare else None,
        "why": [f["message"] for f in ranks[0][bug.name]["bug"]["findings"]] + [f"ALARM {f['message']}" for f in alarms],
    }


def _place(finding: dict[str, Any]) -> tuple[str, str]:
    return finding["rule"], finding["site"][1] if finding["site"] else ""


def _first(findings: Iterable[dict[str, Any]]) -> Finding | None:
    for f in findings:
        if f["severity"] in ALARMS and f["rule"] != "probe":
            site = Site(*f["site"]) if f["site"] else None
            return Finding(f["rule"], f["severity"], f["message"], f["step"], None, site)
    return None


def lines_of(name: str, plan: str, only: list[str] | None) -> list[dict[str, Any]]:
    """Run a set under a plan and return a line for each of its bugs."""
    if name == "open":
        return list(open_bench.run([bug for bug in OPEN if not only or bug.name in only], plan))
    bugs = [bug for bug in SETS[name] if not only or bug.name in only]
    ranks = launch(bugs, plan, timed=True)
    return [judge(bug, ranks, whole_run=plan.startswith("default")) for bug in bugs]


def shown(line: dict[str, Any], why: bool) -> None:
    """Print a line."""
    words = ["yes" if line[key] else "NO" for key in ("detected", "located")]
    print(f"{line['bug']:34} {words[0]:6} {line['steps'] or '-'!s:>5} {words[1]:6} {line['alarms']:>6}  {line['named']}")
    for message in line["why"] if why else ():
        print(f"    {message}")


def main(
    bugs: Annotated[str, typer.Option("--set", help=f"open, {', '.join(SETS)}")] = "open",
    plan: Annotated[str, typer.Option(help="default (what a user gets), or every-step (the audit at each step)")] = "default",
    later: Annotated[
        int, typer.Option(help="steps by which bugs that begin in mid-run begin later, when more was audited")
    ] = 0,
    only: Annotated[list[str] | None, typer.Option(help="names of bugs, as they are printed")] = None,
    why: Annotated[bool, typer.Option(help="print every finding too")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="write the lines to this file")] = None,
) -> None:
    """Print one line a bug; the exit code is 1 when the bar is missed.

    The bar: no false alarm, and under the default plan 60 % found and 90 % of those named first, with the audit at
    every step all found and 80 % named first.
    """
    lines = lines_of(bugs, f"{plan}+{later}" if later else plan, only)
    if output:
        output.write_text(json.dumps(lines, indent=1))
    print(f"{'bug':34} {'found':6} {'steps':>5} {'named':6} {'alarms':>6}  first finding")
    for line in lines:
        shown(line, why)
    found, alarms = sum(line["detected"] for line in lines), sum(line["alarms"] for line in lines)
    named = sum(line["detected"] and line["located"] for line in lines)
    print(f"{found} of {len(lines)} found, {named} of them named first, {alarms} false alarms")
    bar = (0.6 * len(lines), 0.9 * found) if plan == "default" else (len(lines), 0.8 * len(lines))
    raise typer.Exit(0 if found >= bar[0] and named >= bar[1] and not alarms else 1)


if __name__ == "__main__":
    typer.run(main)
