"""How often `trainprobe why` names the true cause, from recorded runs only.

python -m benchmarks.why --cache /tmp/why                 # records what the cache lacks, then asks of each run
python -m benchmarks.why --cache /tmp/why --bench sight --why
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.why.recorded import BENCHES, Kept, run_of
from trainprobe.again.why.why import answer, left_by


def line_of(kept: Kept) -> dict[str, Any]:
    """Ask of a run. place: of the true cause among those told, from 1; 0 where it is not among them."""
    causes, _ = answer(left_by(run_of(kept.folder)))
    truth = kept.truth
    hits = [i for i, one in enumerate(causes, 1) if truth is not None and one.finding is not None and truth(one.finding)]
    told = [f"{one.what} (step {one.step}): {one.sentence}" for one in causes]
    return {"bench": kept.bench, "run": kept.name, "bug": truth is not None, "place": hits[0] if hits else 0, "causes": told}


def figures(lines: list[dict[str, Any]]) -> str:
    """Return the lines of a bench as a row of a table in Markdown."""
    bugs, twins = ([line for line in lines if line["bug"] is kind] for kind in (True, False))
    first, third = (sum(0 < line["place"] <= most for line in bugs) for most in (1, 3))
    quiet = sum(not line["causes"] for line in twins)
    return f"{len(bugs)} | {first} | {third} | {quiet} of {len(twins)} |"


def main(
    cache: Annotated[Path, typer.Option(help="folder that keeps the recorded runs")],
    bench: Annotated[list[str] | None, typer.Option(help=f"only these: {', '.join(BENCHES)}")] = None,
    why: Annotated[bool, typer.Option(help="print every cause")] = False,
    out: Annotated[Path | None, typer.Option(help="write the lines to this file, as JSON")] = None,
) -> None:
    """Print a line a run, and a table."""
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for name, kept_by in BENCHES.items():
        for kept in kept_by(cache) if not bench or name in bench else ():
            lines.append(line := line_of(kept))
            place = line["place"] or ("-" if line["bug"] else "")
            print(f"{name:10} {kept.name:34} {place!s:2} {len(line['causes'])}  {line['causes'][:1]}"[:200], flush=True)
            for told in line["causes"] if why else ():
                print(f"      {told[:220]}")
    if out is not None:
        out.write_text(json.dumps(lines, indent=1))
    print("| bench | bugs | true cause first | among the first three | healthy: nothing found |\n|---|---|---|---|---|")
    for name in (name for name in BENCHES if any(line["bench"] == name for line in lines)):
        print(f"| {name} | {figures([line for line in lines if line['bench'] == name])}")
    print(f"| **all** | {figures(lines)}")


if __name__ == "__main__":
    typer.run(main)
