"""A small training under the real probe, with a spike at step 40 and a NaN at step 50, judged while it runs."""

import torch
from small_training import GPT, batch

import trainprobe
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.watcher import Watcher

RULES = {"spike": {"warmup": 20}, "frozen": {"patience": 4}, "mean_deviation": {"threshold": 2.0, "warmup": 5}}


def watched_training(folder, sinks, steps=60):
    """Train under the real probe with two planted faults; return what the watcher found while it ran."""
    torch.manual_seed(0)
    model = GPT(width=16, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator, watcher, found = torch.Generator().manual_seed(0), Watcher(make_rules(RULES)), []
    plan = {"output": folder, "stacks": False, "construct": False, "statistics": ("norm", "max", "min", "mean"), "sinks": sinks}
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(steps):
            probe.begin_step(step)
            optimizer.zero_grad(set_to_none=True)
            tokens = batch(generator)
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss * (100 if step == 40 else float("nan") if step == 50 else 1)).backward()
            if step != 50:
                optimizer.step()
            probe.note("loss", loss.detach())
            found += watcher(probe.end_step())
    return found
