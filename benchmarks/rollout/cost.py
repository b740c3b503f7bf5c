"""What stamping and checking a push costs, beside a training step: a ratio of CPU time, interleaved.

python -m benchmarks.rollout.cost
"""

from __future__ import annotations

import statistics
import time

import trainprobe
from benchmarks.models import SIZES, prepare

PAIRS = 9


def main() -> None:
    """Print the ratio of one stamp to one training step of the `real` model."""
    training = prepare(SIZES["real"], "whole step")
    training.step(0)
    ratios: list[float] = []
    for i in range(PAIRS):
        start = time.process_time()
        training.step(i)
        middle = time.process_time()
        trainprobe.fingerprints(training.model)
        ratios.append((time.process_time() - middle) / (middle - start))
    print(f"a stamp is {statistics.median(ratios):.1%} of a training step ({min(ratios):.1%} to {max(ratios):.1%})")


if __name__ == "__main__":
    main()
