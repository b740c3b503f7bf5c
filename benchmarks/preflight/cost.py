"""What a preflight costs on the GPT of the other benchmarks: `python -m benchmarks.preflight.cost [PAIRS]`.

CPU time as a ratio to one step (forward and backward, in this process, one behind the other); peak memory of a process beside
that of one that makes two steps alone, in sets of gradients.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

import torch

import trainprobe
from benchmarks.models import SIZES, prepare
from trainprobe.demo.corpus import draw_batch, read_corpus
from trainprobe.demo.gpt import next_token_loss
from trainprobe.preflight.report import Report


def test() -> Report:
    """Test the model once."""
    size, training = SIZES["real"], prepare(SIZES["real"], "fwd+bwd")
    batch = tuple(map(torch.from_numpy, draw_batch(read_corpus(1_000_000), 0, size.batch, size.shape.context)))
    return trainprobe.preflight(
        lambda model, b: next_token_loss(model(b[0]), b[1]), training.model, batch, optimizer=training.optimizer, seconds=600
    )


def peak(kind: str) -> float:
    """Return the peak resident size of a process of its own, in bytes."""
    command = [sys.executable, "-m", "benchmarks.preflight.cost", kind]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(pairs: int) -> None:
    """Print both figures."""
    training = prepare(SIZES["real"], "fwd+bwd")
    training.step(0)
    ratios = []
    for i in range(pairs):
        start = time.process_time()
        training.step(i)
        one = time.process_time()
        report = test()
        ratios.append((time.process_time() - one) / (one - start))
    gradients = sum(p.numel() * p.element_size() for p in training.model.parameters())
    more = (peak("test") - peak("step")) / gradients
    sys.stdout.write(f"{report.passes} runs of the step, CPU time {statistics.median(ratios):.1f} steps {ratios}\n")
    sys.stdout.write(f"{report}\npeak memory {more:+.2f} sets of gradients of {gradients / 1e6:.1f} MB\n")


torch.set_num_threads(1)
if sys.argv[1:] in (["test"], ["step"]):
    if sys.argv[1] == "test":
        test()
    else:
        alone = prepare(SIZES["real"], "fwd+bwd")
        alone.step(0)
        alone.step(1)
    sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
else:
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
