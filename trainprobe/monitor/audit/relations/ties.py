"""Parameters that are tied share storage.

Relation: names that led to one tensor at set-up, or that the plan declares tied, lead to the same data. Nor does the training
begin with an embedding and another matrix of its shape that are two tensors with the same bits and are both trained: they were
tied once. That is a warning, because a head may be begun as a copy. Tolerance none.
Usually caused by a copy, a cast, a resize or a load that gives one of them a tensor of its own (Megatron-LM issue 656); the
two then drift apart, and the loss hardly shows it.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.model import ParameterFact

COST = frozenset({"fingerprints", "host"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "set-up"


def check(evidence: Evidence) -> list[Finding]:
    """Find tied names that lead to different data."""
    was = {name: p for p in evidence.set_up.parameters for name in p.names}
    now = {name: p for p in evidence.model.parameters for name in p.names}
    found: list[Finding] = []
    for names in [*_tied(evidence.set_up.parameters), *evidence.plan.ties]:
        there = [name for name in names if name in now]
        if len(there) < 2 or all(_same(now[name], now[there[0]]) for name in there):
            continue
        moved = [name for name in there if name in was and now[name].identity != was[name].identity]
        name = (moved or there[1:])[0]
        other = next(n for n in there if not _same(now[n], now[name]))
        text = f"{name} no longer shares storage with {other}, to which it is tied"
        found.append(
            evidence.found(
                text,
                name,
                next="tie them again after whatever copied, cast or loaded one of them",
                measured="two tensors",
                expected="one tensor",
                severity="error",
            )
        )
    return [*found, *_lost_before(evidence)]


def _lost_before(evidence: Evidence) -> list[Finding]:
    """Find an embedding, and a matrix that is no embedding, that begin as two copies of one tensor."""
    seen, model = evidence.tensors, evidence.model
    if evidence.before is not None:
        return []
    trained = [p for p in model.parameters if p.trainable and p.owned is not False and len(p.shape) == 2]
    bits = {p.name: seen.checksum(p.name, "value") for p in trained}
    varied = {p.name for p in trained if seen.number(p.name, "value", "max") > seen.number(p.name, "value", "min")}
    for p in trained:
        if p.name not in model.embeddings or p.name not in varied or bits[p.name] is None:
            continue
        twins = [q.name for q in trained if q.name not in model.embeddings and q.shape == p.shape and not _same(p, q)]
        twin = next((name for name in twins if bits[name] == bits[p.name]), None)
        if twin is not None:
            text = (
                f"{twin} and {p.name} begin with the same bits, are two tensors and are trained independently. They were tied, "
                "and something has copied one of them"
            )
            hint = "tie them again before the optimizer is made, or leave this relation out if the head begins as a copy"
            return [evidence.found(text, twin, next=hint, measured="two tensors", expected="one tensor")]
    return []


def _tied(parameters: tuple[ParameterFact, ...]) -> list[tuple[str, ...]]:
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for p in parameters:
        key = (p.storage, p.shape) if p.storage else (p.identity, ())
        groups.setdefault(key, []).extend(p.names)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _same(a: ParameterFact, b: ParameterFact) -> bool:
    return a.identity == b.identity or (a.storage == b.storage and a.storage != 0) or 0 in (a.storage, b.storage)
