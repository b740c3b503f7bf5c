"""`watch(model, optimizer, plan=...)`: a plain training loop with a probe around it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from trainprobe.engine.core.naming import chunks_of
from trainprobe.errors import ProbeError
from trainprobe.probe import PlanSource as PlanSource
from trainprobe.probe import Probe as Probe
from trainprobe.unobserved import lacks_descriptors, unobserved


def probe_class(model: Any) -> type[Probe]:
    """Return the class of the probe for a model: that of MindSpore for its cells, else that of PyTorch."""
    cell = getattr(getattr(sys.modules.get("mindspore"), "nn", None), "Cell", None)
    if cell is None or not any(isinstance(chunk, cell) for chunk in chunks_of(model)):
        return Probe
    from trainprobe.integrations.mindspore_probe import MindSporeProbe

    return MindSporeProbe


@contextmanager
def watch(model: Any, optimizer: Any = None, plan: PlanSource = None, **overrides: Any) -> Generator[Any]:  # a Probe
    """Watch a plain training loop of PyTorch, or of MindSpore where `model` is a cell.

        with trainprobe.watch(model, optimizer, plan="plan.yaml") as probe:
            for batch in data:
                with probe.step():
                    loss = model(batch); probe.note("loss", loss)
                    loss.backward(); optimizer.step(); optimizer.zero_grad()

    plan: path, dict, Plan or None; `overrides` are plan fields. Everything is written when the block ends. Warnings and errors
    are printed when they happen, and one line when the block ends, unless the plan says `console: false`.
    """
    try:
        probe = probe_class(model)(plan, **overrides)
        checking: Any = None
        if probe.framework == "pytorch":
            from trainprobe.integrations import loop_checks as checking
    except (OSError, ProbeError) as fault:
        if not lacks_descriptors(fault):
            raise
        yield unobserved()
        return
    with probe:
        probe.open(model, optimizer)
        probe.watches_own_loop()
        if checking is None:
            yield probe
            return
        for finding in probe.guard.run(lambda *given: list(checking.wrong_optimizers(*given)), model, optimizer) or ():
            probe.report_once(finding)
        del optimizer  # one that the training replaces is not kept
        checks = checking.LoopChecks(model, probe.guard)
        try:
            yield probe
            sentence = probe.guard.run(checks.sentence, probe.begun, probe.judges)
            if sentence and probe.plan.level != "debug":
                probe.at_end(sentence)
        finally:
            checks.close()
