"""Puts the relations to each audited step: a watcher of the probe that compares the ranks where the plan says so.

The one collective of the audit is issued here, after the step's numbers have come to the host, at steps that follow from the
plan alone: every rank issues it at the same ones. A rank whose probe has stopped still answers, so that nobody waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainprobe.engine.facts import StepFacts
from trainprobe.engine.records import Finding, Place, Reel
from trainprobe.monitor.audit.evidence import Evidence, Peer, Tensors, tensors_of
from trainprobe.monitor.audit.messages import Words, decode, digest, encode, key_of, out_of_service, replicas_at_first
from trainprobe.monitor.audit.plan import AuditPlan
from trainprobe.monitor.audit.relations import load_relation
from trainprobe.monitor.scalar_names import scalar

_REMEMBERED = 32  # steps whose batches are remembered
_GRAVITY = {"info": 0, "warning": 1, "error": 2}
Gather = Callable[[Words], list[Words]]


class Audit:
    """The audit of one rank. Call it with each reel, in order.

    take: the facts of the step that a reel holds. gather: brings every rank's message to every rank; None: ranks are not
    compared. certain: axes over which plain parameters are known to be replicated, because somebody told the topology.
    """

    def __init__(self, plan: AuditPlan, take: Callable[[Reel], StepFacts], gather: Gather | None) -> None:
        self.plan = plan
        self.certain: frozenset[str] = frozenset()
        self.last: Evidence | None = None
        self._take = take
        self.gather = gather
        self._replicated: dict[str, frozenset[str]] = {}
        self._batches: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED)
        self._answered = -1  # the last step at which this rank took part in the collective
        self._violated: set[str] = set()  # relations that did not hold when they were last checked

    def __call__(self, reel: Reel) -> list[Finding]:
        """Check the relations that are due and return the violations that are new."""
        due = self.plan.due(reel.step)
        if not due or not reel.complete:
            return []
        evidence = self.evidence(reel, self._take(reel), due)
        return self.judge(evidence, due)

    def judge(self, evidence: Evidence, due: Sequence[str]) -> list[Finding]:
        """Check relations on evidence; a relation that goes on being violated is told once."""
        least = _GRAVITY[self.plan.severity]
        found: list[Finding] = []
        for name in due:
            violations = [f for f in load_relation(name).check(evidence) if _GRAVITY[f.severity] >= least]
            if name not in self._violated:
                found += violations
            (self._violated.add if violations else self._violated.discard)(name)
        return found

    def late(self, facts: StepFacts, step: int, place: Place) -> list[Finding]:
        """Judge what was seen after the last audited step: evaluations."""
        return self.judge(Evidence(step, place, facts, Tensors(), self.plan), ("evaluation",))

    def exchanges(self, step: int, world_size: int) -> bool:
        """Tell whether the ranks are compared at a step: the same answer on every rank."""
        return self.plan.ranks and self.gather is not None and world_size > 1 and self.plan.wants(step, "ranks")

    def answer_for_stopped(self, step: int, place: Place) -> None:
        """Take part in the collective of a step without saying anything: this rank's audit has stopped."""
        if self.gather is not None and self._answered != step and self.exchanges(step, place.world_size):
            self._answered = step
            self.gather(out_of_service(place.rank, step))

    # ---- evidence ------------------------------------------------------------------------------------------------

    def evidence(self, reel: Reel, facts: StepFacts, due: Sequence[str]) -> Evidence:
        """Gather all that the relations may look at, and remember it for the next step."""
        tensors = tensors_of(reel)
        draft = Evidence(
            reel.step, reel.place, facts, tensors, self.plan, reel.scalars, self.last, batches_before=tuple(self._batches)
        )
        peers: tuple[Peer, ...] = ()
        if self.exchanges(reel.step, reel.place.world_size):
            peers = self._compare(draft)
        evidence = replace(draft, peers=peers, replicated=dict(self._replicated), norms=_norms(draft, self._replicated, peers))
        self._batches.append(facts.batches)
        if any("fingerprints" in load_relation(name).COST for name in due) or self.last is None:
            self.last = replace(evidence, before=None)
        else:
            self.last = replace(self.last, step=evidence.step, facts=facts, tensors=Tensors(), scalars=evidence.scalars)
        return evidence

    def _compare(self, draft: Evidence) -> tuple[Peer, ...]:
        names = list(draft.tensors.names)
        unknown = any(name not in self._replicated for name in names)
        peers = self._tell(draft)
        if peers and (unknown or not self._replicated):
            self._learn(draft, peers)
        return peers

    def _tell(self, draft: Evidence) -> tuple[Peer, ...]:
        """Send this rank's message and return everybody's; nothing where a rank has stopped or is at another step."""
        assert self.gather is not None
        self._answered = draft.step
        told = [decode(words) for words in self.gather(encode(_message(draft, self._replicated), draft.step))]
        if any(peer.marks["out"] or step != draft.step for peer, step in told):
            return ()
        return tuple(sorted((peer for peer, _ in told), key=lambda peer: peer.rank))

    def _learn(self, draft: Evidence, peers: tuple[Peer, ...]) -> None:
        """Find out over which axes each new parameter and buffer is replicated."""
        axes = {axis: place for axis, place in draft.place.axes.items() if place[1] > 1}
        new = [name for name in draft.tensors.names if name not in self._replicated]
        seen = replicas_at_first(new, "value", axes, peers, draft.place.rank)
        for name in new:
            said = draft.tensors.replicas.get(name)
            over = frozenset(said) if said is not None else seen[name] | (self.certain & axes.keys())
            self._replicated[name] = over
        buffers = replicas_at_first(list(draft.facts.buffers), "buffer", axes, peers, draft.place.rank)
        for name, over in buffers.items():
            self._replicated.setdefault(f"buffer {name}", over)


def _message(draft: Evidence, replicated: Mapping[str, frozenset[str]]) -> Peer:
    seen, facts, place = draft.tensors, draft.facts, draft.place
    rows: dict[int, tuple[int, float]] = {}
    counter = float("nan")
    for name, slot in seen.rows:
        if slot.endswith("_after") and slot != "value_after":
            continue
        rows[key_of(name, slot)] = (seen.checksum(name, slot) or 0, seen.number(name, slot, "norm"))
        if slot == "step":
            counter = max(counter, seen.number(name, slot, "mean")) if counter == counter else seen.number(name, slot, "mean")
    for name, checksum in facts.buffers.items():
        rows[key_of(name, "buffer")] = (checksum, 0.0)
    rows |= {key_of(name, "rests"): (1, 0.0) for name, training in facts.model.modes.items() if not training}
    before, after = _shares(draft, replicated)
    own = _total(draft, "grad"), _total(draft, "grad_unclipped")
    numbers = {
        "lr": facts.rates[0] if facts.rates else float("nan"),
        "loss_scale": _or_nan(scalar(draft.scalars, "loss scale")),
        "counter": counter,
        "reported_norm": _or_nan(scalar(draft.scalars, "gradient norm")),
        "unclipped": before,
        "clipped": after,
        "coefficient": math.sqrt(own[0] / own[1]) if own[1] > 0 else float("nan"),
        "loss": _or_nan(scalar(draft.scalars, "loss")),
        "updates": float(facts.updates),
    }
    marks = {
        "modes": digest(repr(sorted(facts.model.modes.items()))),
        "trainable": digest(repr([(p.name, p.trainable) for p in facts.model.parameters])),
        "random": facts.random,
        "drawn": int(facts.drawn),
        "whole_numbers": int(facts.whole_numbers),
    }
    axes = {axis: index for axis, (index, _) in place.axes.items()}
    products = {key_of(p.name, "both"): p.both for p in facts.projections}
    return Peer(place.rank, axes, numbers, marks, facts.batches, rows, products)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _total(draft: Evidence, slot: str) -> float:
    return sum(draft.tensors.number(name, slot, "norm") ** 2 for name in draft.tensors.with_slot(slot))


def _shares(draft: Evidence, replicated: Mapping[str, frozenset[str]]) -> tuple[float, float]:
    """Return this rank's share in the squared norm of all gradients, before and after clipping: a replica counts in parts."""
    before = after = 0.0
    axes = draft.place.axes
    if axes and any(name not in replicated for name in draft.tensors.with_slot("grad")):
        return float("nan"), float("nan")
    for name in draft.tensors.with_slot("grad"):
        copies = math.prod(axes[axis][1] for axis in replicated.get(name, ()) if axis in axes)
        clipped = draft.tensors.number(name, "grad", "norm") ** 2
        whole = (
            draft.tensors.number(name, "grad_unclipped", "norm") ** 2 if (name, "grad_unclipped") in draft.tensors else clipped
        )
        before, after = before + whole / copies, after + clipped / copies
    return before, after


def _norms(draft: Evidence, replicated: Mapping[str, frozenset[str]], peers: tuple[Peer, ...]) -> dict[str, float]:
    """Return the norm of all logical gradients, where it can be known, and that of what this rank holds."""
    if not any(draft.tensors.with_slot("grad")):
        return {}
    axes = {axis for axis, (_, size) in draft.place.axes.items() if size > 1}
    slot = "grad_unclipped" if any(draft.tensors.with_slot("grad_unclipped")) else "grad"
    own = {"own": math.sqrt(_total(draft, slot))}
    whole = draft.place.world_size == 1 or all(axes <= replicated.get(name, frozenset()) for name in draft.tensors.names)
    if peers:
        shares = [(peer.numbers["unclipped"], peer.numbers["clipped"]) for peer in peers]
        if any(math.isnan(share) for share, _ in shares):
            shares = [_shares_in_rows(draft, replicated, peer) for peer in peers]
        totals = [sum(column) for column in zip(*shares, strict=True)]
        return (
            own | {"unclipped": math.sqrt(totals[0]), "clipped": math.sqrt(totals[1])} if all(t >= 0 for t in totals) else own
        )
    if not whole:
        return own
    before, after = _total(draft, slot), _total(draft, "grad")
    return own | {"unclipped": math.sqrt(before), "clipped": math.sqrt(after)}


def _shares_in_rows(draft: Evidence, replicated: Mapping[str, frozenset[str]], peer: Peer) -> tuple[float, float]:
    """Return a rank's share in the squared norm from its rows; NaN where it has gradients that this rank has not."""
    axes = draft.place.axes
    before = after = 0.0
    names = list(draft.tensors.with_slot("grad"))
    if sum(key_of(name, "value") in peer.rows for name in draft.tensors.names) != len(draft.tensors.names):
        return float("nan"), float("nan")
    for name in names:
        copies = math.prod(axes[axis][1] for axis in replicated.get(name, ()) if axis in axes)
        clipped = peer.rows.get(key_of(name, "grad"), (0, 0.0))[1] ** 2
        whole = peer.rows.get(key_of(name, "grad_unclipped"), (0, math.sqrt(clipped)))[1] ** 2
        before, after = before + whole / copies, after + clipped / copies
    return before, after
