"""Parameters that are tied share storage.

Relation: names that led to one tensor at set-up, or that the plan declares tied, lead to the same data. Tolerance none.
Usually caused by a copy, a cast, a resize or a load that gives one of them a tensor of its own (Megatron-LM issue 656); the
two then drift apart, and the loss hardly shows it.
"""

from __future__ import annotations

from trainprobe.engine.core.facts import ParameterFact
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS: frozenset[str] = frozenset()
EVERY = 10
STAGE = "set-up"


def check(evidence: Evidence) -> list[Finding]:
    """Find tied names that lead to different data."""
    was = {name: p for p in evidence.facts.set_up.parameters for name in p.names}
    now = {name: p for p in evidence.model.parameters for name in p.names}
    found: list[Finding] = []
    for names in [*_tied(evidence.facts.set_up.parameters), *evidence.plan.ties]:
        there = [name for name in names if name in now]
        if len(there) < 2 or all(_same(now[name], now[there[0]]) for name in there):
            continue
        moved = [name for name in there if name in was and now[name].identity != was[name].identity]
        name = (moved or there[1:])[0]
        other = next(n for n in there if not _same(now[n], now[name]))
        text = f"{name} no longer shares storage with {other}, to which it is tied"
        found.append(
            evidence.finding(
                "ties",
                text,
                name,
                measured="two tensors",
                expected="one tensor",
                next="tie them again after whatever copied, cast or loaded one of them",
            )
        )
    return found


def _tied(parameters: tuple[ParameterFact, ...]) -> list[tuple[str, ...]]:
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for p in parameters:
        key = (p.storage, p.shape) if p.storage else (p.identity, ())
        groups.setdefault(key, []).extend(p.names)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _same(a: ParameterFact, b: ParameterFact) -> bool:
    return a.identity == b.identity or (a.storage == b.storage and a.storage != 0) or 0 in (a.storage, b.storage)
