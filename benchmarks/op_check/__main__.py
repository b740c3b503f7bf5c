"""Print the calibration of op_check: torch's kernels on torch's sample inputs, planted faults, healthy deviations.

`python -m benchmarks.op_check [--samples N] [--only NAME]`; the sample inputs need expecttest (requirements/dev.txt).
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch

from benchmarks.op_check import healthy, planted
from benchmarks.op_check.calibration import calibrate


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--samples", type=int, default=4, help="of each operator and dtype")
    asked.add_argument("--only", default="", help="operators whose name holds this")
    options = asked.parse_args()
    reveal = [planted.judged(one).worst.outcome for one in planted.PLANTS]
    hide = [planted.judged(one, hidden=True).worst.outcome for one in planted.PLANTS if one.hide]
    print(f"planted faults: {len(reveal)}; where inputs reveal them {dict(Counter(reveal))}, hide them {dict(Counter(hide))}")
    right = [healthy.judged(*one[1:]).worst.outcome for one in healthy.HEALTHY]
    print(f"healthy deviations: {len(right)}, {dict(Counter(right))}")
    found = calibrate(options.samples, options.only)
    print(
        f"{found.done} of the {found.entries} entries of torch {torch.__version__} judged, up to {options.samples} samples each"
    )
    for (dtype, direction), counts in found.counts.items():
        print(f"{dtype} {direction}: {dict(counts)}")
    for dtype, able in found.able.items():
        left = able - found.judged[dtype]
        print(
            f"{dtype}: {len(able - left)} of {len(able)} entries have a call that was judged; none of {', '.join(sorted(left))}"
        )
    for outcome in ("bug", "suspicious"):
        print(f"{outcome}: {dict(Counter(w[0] for w in found.wrong if w[3].startswith(outcome)))}")
    for reason, names in sorted(found.skipped.items(), key=lambda item: -len(item[1])):
        print(f"not checked, {len(names)} entries: {reason}: {', '.join(sorted(names)[:8])}")


main()
