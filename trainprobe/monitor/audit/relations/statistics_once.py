"""A batch goes into the running statistics once.

Relation: a normalisation whose running statistics a forward of the step has moved is not run again, in training mode and with
statistics that are tracked, within the backward pass. Tolerance none. Reported as a warning: the training itself is the same,
and what is evaluated differs a little.
Usually caused by activation checkpointing around batch normalisation: the second forward moves the statistics again, so they
forget twice as fast as their momentum says (pytorch issue 96136). Checkpoints that hold back tracking in one of the two
forwards, and normalisation without running statistics, cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import GivenInputs

COST = frozenset({"host"})
OBSERVERS = frozenset({"module_inputs"})
STAGE = "backward"


def check(evidence: Evidence) -> list[Finding]:
    """Find running statistics that are moved twice."""
    names = list(evidence.of(GivenInputs).moved_twice)
    if not names:
        return []
    text = (
        f"the running statistics of {and_more(names)} were moved by the forward, and again by the one that ran in the backward "
        "pass. Each batch counts twice"
    )
    hint = "leave the normalisation out of the checkpoint, or set its momentum to 1 - sqrt(1 - momentum)"
    return [evidence.found(text, names, "buffer", next=hint, measured=2.0, expected=1.0, kind="module")]
