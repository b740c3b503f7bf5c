"""Buffers stay free of NaN.

Relation: a buffer without a NaN at one audited step has none at the next. Tolerance none. Reported as an error where it is a
running statistic, which no later step can mend, as a warning elsewhere.
Usually caused by a batch with a NaN or an infinity whose step was skipped because its loss was not finite: the forward has
already averaged it into the running statistics. Training goes on with the statistics of each batch, and every evaluation
gives NaN. Buffers that are averages of finite numbers cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import BufferStates

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"buffers"})
STAGE = "update"
_STATISTICS = ("running_mean", "running_var")


def check(evidence: Evidence) -> list[Finding]:
    """Find buffers that have become NaN."""
    before = evidence.before
    if before is None:
        return []
    sound = (before.of(BufferStates).begun.keys() | before.of(BufferStates).updated.keys()) - set(
        before.of(BufferStates).spoiled
    )
    bad = [name for name in evidence.of(BufferStates).spoiled if name in sound]
    if not bad:
        return []
    text = f"NaN in {and_more(bad)}, where there was none at step {before.step}"
    hint = (
        f"look for a batch with a NaN between steps {before.step} and {evidence.step}. Test the input, not the loss, and "
        "load these buffers from an earlier checkpoint"
    )
    return [
        evidence.found(
            text,
            bad,
            "buffer",
            next=hint,
            measured="NaN",
            expected="finite",
            severity="error" if bad[0].endswith(_STATISTICS) else "warning",
        )
    ]
