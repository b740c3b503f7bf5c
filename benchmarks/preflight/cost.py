"""What a preflight costs: `python -m benchmarks.preflight.cost`. Each case in a process of its own, on one thread.

Seconds are those of the processor. step: the first of two steps of a training is left out. Peak: of the resident memory, beside
that of the same process with its model, batch and optimizer before anything ran.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch

import trainprobe
from benchmarks.models import SIZES
from trainprobe.demo.corpus import draw_batch, read_corpus
from trainprobe.demo.gpt import GPT, next_token_loss


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(what: str) -> dict[str, float]:
    """Run one case: step, preflight, overfit, charts, or the name of a property. Returns seconds, passes and MiB."""
    torch.set_num_threads(1)
    size = SIZES["real"]
    torch.manual_seed(0)
    model = GPT(size.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    corpus = read_corpus(1_000_000)
    batch = tuple(map(torch.from_numpy, draw_batch(corpus, 0, size.batch, size.shape.context)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return next_token_loss(model(batch[0]), batch[1])

    before, start, passes = _peak(), time.process_time(), 1
    if what == "step":
        for _ in range(2):
            start = time.process_time()
            optimizer.zero_grad(set_to_none=True)
            loss(model, batch).backward()
            optimizer.step()
    else:
        asked = {"preflight": {}, "overfit": {"only": ["overfit"]}, "charts": {"charts": True}}.get(what, {"only": [what]})
        report = trainprobe.preflight(loss, model, batch, optimizer=optimizer, seconds=3600, **asked)
        passes = report.passes
        assert not report.broken, report
    return {"seconds": time.process_time() - start, "passes": passes, "MiB": _peak() - before, "weights": weights}


def main() -> None:
    """Print a line for each case."""
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(run(sys.argv[1])))
        return
    for what in ("step", "preflight", "charts", "overfit", "split", "rows", "gradient", "update", "input"):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.preflight.cost", what], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)
        sys.stdout.write(
            f"{what}: {found['passes']} passes, {found['seconds']:.2f} s, {found['MiB']:.0f} MiB"
            f" (weights {found['weights']:.0f} MiB)\n"
        )
        sys.stdout.flush()


main()
