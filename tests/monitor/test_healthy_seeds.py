"""No alarm on healthy seeds: a tiny GPT without warm-up or clipping, whose single gradients have heavy tails."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from benchmarks.models import SIZES
from trainprobe.demo.corpus import draw_batch, read_corpus
from trainprobe.demo.gpt import GPT, next_token_loss

STEPS = 220


def findings(folder, seed: int, rate: float, batches: int) -> list[str]:
    size, corpus = SIZES["tiny"], read_corpus(1_000_000)
    torch.manual_seed(seed)
    model = GPT(size.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    plan = {"level": "off", "sinks": [], "stacks": False, "monitor": True}
    with trainprobe.watch(model, optimizer, plan=plan, output=folder) as probe:
        for step in range(STEPS):
            drawn = draw_batch(corpus, seed * 100_000 + step % batches, size.batch, size.shape.context)
            inputs, targets = map(torch.from_numpy, drawn)
            with probe.step(step):
                optimizer.zero_grad(set_to_none=True)
                loss = next_token_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                probe.note("loss", loss.detach())
    return [f.message for f in probe.findings if f.severity != "info"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "rate", "batches"),
    [
        *((seed, 1e-4, 8) for seed in (0, 1, 2, 3, 5)),  # eight batches over and over: each of these once raised an alarm
        (24, 1e-3, 100_000),  # the highest outlier of sixty runs, at step 64
    ],
)
def test_a_healthy_run_raises_no_alarm(tmp_path, seed, rate, batches):
    assert findings(tmp_path / "out", seed, rate, batches) == []
