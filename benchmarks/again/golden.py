"""A golden record against 20 harmless changes and 20 regressions.

python -m benchmarks.again.golden [--only WORDS]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.again import golden_program
from benchmarks.again.golden_program import HARMLESS, REGRESSIONS, STEPS
from trainprobe.again.conditions.golden import changed_since, judge, pack_of, record, shown_by
from trainprobe.again.golden_record import read_golden

PROGRAM = str(Path(golden_program.__file__))


def main() -> None:
    """Print a line a change, and the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    folder = Path(tempfile.mkdtemp())
    golden = folder / "golden.txt"
    record(golden, [PROGRAM], STEPS)
    rows = read_golden(golden)
    alarms = named = 0
    for i, name in enumerate(["", *HARMLESS, *REGRESSIONS]):
        if only not in name:
            continue
        now, pack = shown_by([PROGRAM, name], folder / f"run{i}", STEPS, 1)
        verdict = judge(rows, now, changed_since(pack_of(golden), pack))
        if name in REGRESSIONS:
            right = verdict.code == 2 and any(word in verdict.sentence for word in REGRESSIONS[name])
            named += right
            print(
                f"regression  {name:34} {'named' if right else 'MISSED':7} {verdict.code} {verdict.sentence[:170]}", flush=True
            )
        else:
            alarms += verdict.code >= 2
            print(
                f"harmless    {name:34} {'ALARM' if verdict.code >= 2 else 'quiet':7} {verdict.code} {verdict.sentence[:170]}",
                flush=True,
            )
    print(f"regressions: {named} of {len(REGRESSIONS)} named with their first module")
    print(f"harmless changes: {alarms} alarms of {len(HARMLESS)}")


if __name__ == "__main__":
    main()
