"""Parameter objects are those seen at set-up, and a data-parallel wrapper reduces exactly them.

Relation: each name leads to the object that it led to when the probe was opened; every trainable parameter of a model that
DistributedDataParallel wraps is one that it registered. Tolerance none.
Usually caused by a cast or move that makes new parameters (pytorch issue 104336), or by assigning `module.weight =
Parameter(…)`: optimizers, gradient hooks and reducers go on with the old ones.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "set-up"


def check(evidence: Evidence) -> list[Finding]:
    """Find names that lead to another object than at set-up, or to one that the wrapper does not know."""
    was = {name: p for p in evidence.set_up.parameters for name in p.names}
    now = {name: p for p in evidence.model.parameters for name in p.names}
    other = [name for name in was if name in now and now[name].identity != was[name].identity]
    gone = [name for name in was if name not in now] + [name for name in now if name not in was]
    findings: list[Finding] = []
    if other:
        text = f"the parameter objects are not those seen at set-up: {and_more(other, len(was))} was replaced"
        hint = "replace values in place (copy_) or make the optimizer and wrappers again afterwards"
        findings.append(
            evidence.found(text, other, next=hint, measured="replaced", expected="the same object", severity="error")
        )
    elif gone:
        text = f"the model's parameters are not those of set-up: {and_more(gone)} appeared or disappeared"
        findings.append(
            evidence.found(text, gone, measured="appeared or disappeared", expected="as at set-up", severity="error")
        )
    foreign = evidence.model.foreign
    if foreign and not other:
        text = (
            f"{evidence.model.wrapped or 'the wrapper'} does not reduce {and_more(list(foreign))}: it "
            "registered other objects before "
            "they were replaced, so their gradients stay those of one rank"
        )
        findings.append(
            evidence.found(text, foreign, "grad", measured="not registered", expected="registered", severity="error")
        )
    return findings
