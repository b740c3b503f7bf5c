"""Puts the relations to each audited step: a watcher of the probe that compares the ranks where the plan says so.

The one collective of the audit is issued here, after the step's numbers have come to the host, at steps that follow from the
plan alone: every rank issues it at the same ones. A rank whose probe has stopped still answers, so that no rank waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainprobe.engine.core.findings import Cause, Count, cause_of, counted_all
from trainprobe.engine.core.gathering import Payload
from trainprobe.engine.core.guard import Part, simply
from trainprobe.engine.core.records import TOLD, Finding, Place, StepData
from trainprobe.monitor.audit.evidence import AuditHistory, Evidence, TensorsOfStep, tensors_of
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.facts.calls import RandomFingerprints, TrainingCalls
from trainprobe.monitor.audit.facts.gradients import Projections, Reductions
from trainprobe.monitor.audit.facts.saves import Save, Saves
from trainprobe.monitor.audit.facts.updates import BufferStates, Schedules, UpdateCounts, UsedGroups
from trainprobe.monitor.audit.history import handed_over, learned, stepped_here
from trainprobe.monitor.audit.messages import Rows, decode, digest, encode, key_of, out_of_service
from trainprobe.monitor.audit.peers import GradientShare, Peer
from trainprobe.monitor.audit.plan import AuditPlan
from trainprobe.monitor.audit.relations import load_relation
from trainprobe.monitor.audit.relations.replicated_buffers import is_shared
from trainprobe.monitor.audit.relations.reported_loss import differentiated
from trainprobe.monitor.audit.relations.saved_and_loaded import came_back, held
from trainprobe.monitor.audit.replication import (
    constants_with_matrices,
    doubted_biases,
    logical_norms,
    replicas_at_first,
    with_known_shares,
)
from trainprobe.monitor.audit.resharded import Resharded, as_pieces, is_resharded, rows_of, what_was_loaded
from trainprobe.monitor.rules import GRAVITY
from trainprobe.monitor.scalar_names import scalar

_OF_OWN_WEIGHTS = ("untouched_between_steps", "written_between_steps", "update_rule")
_OF_RANKS_ALIKE = ("untouched_between_steps",)  # others hand over weights, or an average of them, behind an update
Gather = Callable[[Payload], list[Payload]]


class Audit:
    """The audit of one rank. Call it with each collected step, in order.

    take: the facts of a collected step. gather: brings every rank's message to every rank; None: ranks are not
    compared. certain: axes over which plain parameters are known to be replicated, because the caller gave the topology.
    assumed: neither the caller nor a wrapper says what the ranks share. own_loop: the loop is the user's own, not a trainer's.
    """

    def __init__(self, plan: AuditPlan, take: Callable[[StepData], Facts], gather: Gather | None) -> None:
        self.plan = plan
        self.certain: frozenset[str] = frozenset()
        self.assumed = False
        self.not_compared: Callable[[], str] = str  # why ranks are not compared, though the plan asks for it
        self.not_only_own: Callable[[], str] = str  # why weights may change by more than the updates of this process
        self.own_loop = False
        self.last: Evidence | None = None
        self._take = take
        self.gather = gather
        self._replicated: dict[str, frozenset[str]] = {}
        self._resumed: Save | None = None  # what was loaded, until its schedule has been looked at
        self._resharded: Resharded | None = None  # what was loaded in another layout, until the ranks have compared it
        self._history = AuditHistory()
        self._memory: dict[str, Any] = {}  # by the names of the relations that remember something
        self._answered = -1  # the last step at which this rank took part in the collective
        self._violated: dict[str, list[Finding]] = {}  # relations that did not hold when they were last checked
        self._reported: dict[Cause, Finding] = {}
        self.count: Count = counted_all  # findings that hold at one more step
        self.part: Part = simply  # runs one relation

    def __call__(self, step_data: StepData) -> list[Finding]:
        """Check the relations that are due and return the violations that are new."""
        due = self.plan.due(step_data.step)
        if not step_data.complete or not ("audit" in step_data.programs or due):
            return []
        facts = self._take(step_data)
        saves = facts.of(Saves)
        if saves.loaded is not None or saves.saved or self._resumed or self._resharded:  # whenever something was loaded
            due = (*due, *(name for name in ("resumed", "saved_and_loaded") if self.plan.interval(name) and name not in due))
        if not due:
            return []
        evidence = self.evidence(step_data, facts, due)
        return self.judge(evidence, due)

    def judge(self, evidence: Evidence, due: Sequence[str]) -> list[Finding]:
        """Check relations on evidence; what was reported before, and holds again, is counted there."""
        apart = (_OF_OWN_WEIGHTS if self.not_only_own() else ()) + (_OF_RANKS_ALIKE if self.not_compared() else ())
        least = GRAVITY[self.plan.severity]
        found: list[Finding] = []
        for name in (name for name in due if name not in apart):
            checked = self.part(_part_of(name), _check, name, evidence) or ()
            violations = [finding for finding in checked if GRAVITY[finding.severity] >= least]
            if not violations:
                self._violated.pop(name, None)
                continue
            fresh = [finding for finding in violations if cause_of(finding) not in self._reported]
            again = [self._reported[cause_of(finding)] for finding in violations if finding not in fresh]
            if name in self._violated:  # all the time since
                fresh, again = [], self._violated[name]
            self._violated[name] = [*self.count(again, evidence.step), *fresh]
            self._reported |= {cause_of(finding): finding for finding in self._violated[name]}
            found += fresh
        return found

    def late(self, facts: Facts, step: int, place: Place) -> list[Finding]:
        """Judge what was seen after the last audited step: evaluations, and writes to weights."""
        return self.judge(Evidence(step, place, facts, TensorsOfStep(), self.plan), ("evaluation", "written_between_steps"))

    def exchanges(self, step: int, world_size: int) -> bool:
        """Tell whether the ranks are compared at a step: the same answer on every rank."""
        return self._compares(world_size) and self.plan.wants(step, "ranks")

    def _compares(self, world_size: int) -> bool:
        return self.plan.ranks and self.gather is not None and world_size > 1 and not self.not_compared()

    def answer_for_stopped(self, step: int, place: Place) -> None:
        """Take part in the collective of a step without saying anything: this rank's audit has stopped."""
        if self.gather is not None and self._answered != step and self.exchanges(step, place.world_size):
            self._answered = step
            self.gather(out_of_service(place.rank, step))

    # ---- evidence ------------------------------------------------------------------------------------------------

    def evidence(self, step_data: StepData, facts: Facts, due: Sequence[str]) -> Evidence:
        """Gather all that the relations may look at, and remember it for the next step."""
        saves, schedules, tensors = facts.of(Saves), facts.of(Schedules).schedules, tensors_of(step_data)
        if saves.loaded is not None:
            self._resharded = self._take_resharded(facts, tensors, step_data)
        if saves.saved:
            self._resumed = came_back(saves.saved, tensors)
        if self._resharded is not None and self._resharded.schedules is None and schedules:
            self._resharded = replace(self._resharded, schedules=() if self._resumed is not None else schedules)
        draft = Evidence(
            step_data.step,
            step_data.place,
            facts,
            tensors,
            self.plan,
            {name: x for name, x in step_data.scalars.items() if not name.startswith(TOLD)},  # claims of nobody
            self.last,
            resumed=self._resumed,
            resharded=self._resharded,
            history=self._history,
            memory=dict(self._memory),
            assumed=self.assumed,
            own_loop=self.own_loop,
        )
        peers: tuple[Peer, ...] = ()
        if self.exchanges(step_data.step, step_data.place.world_size):
            peers = self._compare(draft)
        replicated = dict(self._replicated)
        evidence = replace(draft, peers=peers, replicated=replicated)
        evidence = replace(evidence, norms=_norms(evidence))
        if peers:
            evidence = replace(evidence, history=replace(evidence.history, handed_over=handed_over(evidence)))
        self._history = learned(evidence)
        self._memory |= {
            name: self.part(_part_of(name), remember, evidence) for name, remember in _functions(self.plan, "remember").items()
        }
        self._forget_load(evidence)
        if any("fingerprints" in load_relation(name).COST for name in due) or self.last is None:
            self.last = replace(evidence, before=None)
        else:
            self.last = replace(self.last, step=evidence.step, facts=facts, tensors=TensorsOfStep(), scalars=evidence.scalars)
        return evidence

    def _shared_rows(self, draft: Evidence) -> Rows:
        """Return what the relations of the plan send to the other ranks."""
        rows_of_relations = [
            self.part(_part_of(name), shares, draft) or {} for name, shares in _functions(self.plan, "shares").items()
        ]
        return {key: row for rows in rows_of_relations for key, row in rows.items()}

    def _take_resharded(self, facts: Facts, tensors: TensorsOfStep, step_data: StepData) -> Resharded | None:
        """Return what was loaded before this step, where ranks or cuts are others than when this rank saved."""
        saves = facts.of(Saves)
        pieces, world = as_pieces(held(tensors), saves.loaded or {}), step_data.place.world_size
        own = saves.saved[-1] if saves.saved else None
        cut = is_resharded(own, pieces)
        if not cut and own is not None and own.world == world:
            return None
        return Resharded(
            step_data.step,
            pieces,
            cut,
            saves.saved_by_ranks(),
            not self._compares(world),
            facts.of(TrainingCalls).batches,
        )

    def _forget_load(self, evidence: Evidence) -> None:
        """Let go of what was loaded once it has been judged; of its schedules only when one was seen."""
        resharded, seen = evidence.resharded, bool(evidence.of(Schedules).schedules)
        if resharded is not None and resharded.judgeable(evidence.peers):
            self._resumed = self._resumed or (
                what_was_loaded(resharded, evidence.peers) if resharded.schedules is None else None
            )
            self._resharded = None
        self._resumed = None if seen else self._resumed

    def _compare(self, draft: Evidence) -> tuple[Peer, ...]:
        """Send this rank's message and return everybody's; nothing where a rank has stopped or is at another step."""
        assert self.gather is not None
        self._answered = draft.step
        messages = [
            decode(words)
            for words in self.gather(encode(_message(draft, self._replicated, self._shared_rows(draft)), draft.step))
        ]
        if any(peer.marks["out"] or step != draft.step for peer, step in messages):
            return ()
        peers = sorted((peer for peer, _ in messages), key=lambda peer: peer.rank)
        self._learn(draft, peers)
        return with_known_shares(peers, draft.axes, self.certain)

    def _learn(self, draft: Evidence, peers: Sequence[Peer]) -> None:
        """Find out over which axes the value of each new parameter, and each new buffer, is replicated."""
        buffers = draft.of(BufferStates)
        new = {name: key_of(name, "value") for name in draft.tensors.names if name not in self._replicated}
        gradients = [key_of(name, "grad") for name in new if (name, "grad") in draft.tensors]
        seen = replicas_at_first([*new.values(), *gradients], draft.axes, peers, draft.place.rank) if new else {}
        doubted = doubted_biases(draft.model.parameters, {n: seen[key] for n, key in new.items()}, draft.axes)
        for name, key in new.items():
            declared, over = draft.tensors.replicas.get((name, "value")), seen[key]
            unsure = draft.axes if name in doubted else draft.axes & {"pp"}  # other stages may have the same names and seeds
            if declared is None and over & unsure:
                if (name, "grad") not in draft.tensors:
                    continue  # once it has a gradient, that tells
                over -= unsure - seen[key_of(name, "grad")]
            self._replicated[name] = declared if declared is not None else over | (self.certain & set(draft.axes))
        fresh = {f"buffer {name}": key_of(name, "buffer") for name in buffers.updated}
        fresh |= {f"begun {name}": key_of(name, "begun") for name in buffers.begun if is_shared(name)}
        fresh = {name: key for name, key in fresh.items() if name not in self._replicated}
        seen = replicas_at_first(fresh.values(), draft.axes, peers, draft.place.rank) if fresh else {}
        self._replicated |= {name: seen[key] for name, key in fresh.items()}


def _functions(plan: AuditPlan, name: str) -> dict[str, Callable[[Evidence], Any]]:
    """Return an optional function of the relations that a plan checks, by the relations that have it."""
    found = {relation: getattr(load_relation(relation), name, None) for relation in plan.checked()}
    return {relation: function for relation, function in found.items() if function is not None}


def _part_of(relation: str) -> str:
    return f"the relation {relation}"


def _check(name: str, evidence: Evidence) -> list[Finding]:
    return list(load_relation(name).check(replace(evidence, relation=name)))


def _message(draft: Evidence, replicated: Mapping[str, frozenset[str]], shared: Rows) -> Peer:
    seen, place, model = draft.tensors, draft.place, draft.model
    calls, buffers = draft.of(TrainingCalls), draft.of(BufferStates)
    groups, random = draft.of(UsedGroups), draft.of(RandomFingerprints)
    rows: dict[int, tuple[int, float]] = {}
    counter = float("nan")
    for name, slot in seen.rows:
        if slot.endswith("_after") and slot != "value_after":
            continue
        rows[key_of(name, slot)] = (seen.checksum(name, slot) or 0, seen.number(name, slot, "norm"))
        if slot == "step":
            counter = max(counter, seen.number(name, slot, "mean")) if counter == counter else seen.number(name, slot, "mean")
    for name, checksum in buffers.updated.items():
        rows[key_of(name, "buffer")] = (checksum, 0.0)
    rows |= {key_of(name, "begun"): (checksum, 0.0) for name, checksum in buffers.begun.items() if is_shared(name)}
    rows |= {key_of(name, "rests"): (1, 0.0) for name, training in model.modes.items() if not training}
    rows |= {key_of(p.name, "frozen"): (1, 0.0) for p in model.parameters if not p.trainable}
    rows |= stepped_here(draft) | shared
    own = _total(draft, "grad"), _total(draft, "grad_unclipped")
    numbers = {
        "lr": groups.rates[0] if groups.rates else float("nan"),
        "loss_scale": _or_nan(scalar(draft.scalars, "loss scale")),
        "counter": counter,
        "reported_norm": _or_nan(scalar(draft.scalars, "gradient norm")),
        "coefficient": math.sqrt(own[0] / own[1]) if own[1] > 0 else float("nan"),
        "loss": _or_nan(scalar(draft.scalars, "loss")),
        "updates": float(draft.of(UpdateCounts).updates),
        "tokens": float(sum(calls.tokens)),
        "differentiated": differentiated(draft),
    }
    marks = {
        "modes": digest(repr(sorted(model.modes.items()))),
        "trainable": digest(repr([(p.name, p.trainable) for p in model.parameters])),
        "random": random.ended,
        "region": random.region,
        "drawn": int(calls.drawn),
        "whole_numbers": int(calls.whole_numbers),
    }
    rows |= rows_of(draft.resharded) if draft.resharded is not None else {}
    axes = {axis: index for axis, (index, _) in place.axes.items()}
    products = {key_of(p.name, "both"): p.both for p in draft.of(Projections).projections}
    products |= {key_of(r.name, "arrived"): r.arrived for r in draft.of(Reductions).reductions}
    return Peer(place.rank, axes, numbers, marks, calls.batches, rows, products, _shares(draft, replicated))


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _total(draft: Evidence, slot: str) -> float:
    return sum(draft.tensors.number(name, slot, "norm") ** 2 for name in draft.tensors.with_slot(slot))


def _shares(draft: Evidence, replicated: Mapping[str, frozenset[str]]) -> dict[int, GradientShare]:
    """Return key of each gradient that this rank holds → its share, before and after clipping."""
    seen, shares = draft.tensors, dict[int, GradientShare]()
    constants = constants_with_matrices(draft.model.parameters, seen)
    for name in seen.with_slot("grad"):
        clipped = seen.number(name, "grad", "norm")
        unclipped = seen.number(name, "grad_unclipped", "norm") if (name, "grad_unclipped") in seen else clipped
        over = seen.replicas.get((name, "grad"), replicated.get(name, seen.replicas.get((name, "value"))))
        doubted = over is None and (name in constants or "pp" in draft.axes)
        rectangle = seen.pieces.get((name, "grad"), seen.pieces.get((name, "value"), ""))
        piece = digest(rectangle) if rectangle else 0
        shares[key_of(name, "grad")] = GradientShare(key_of(name, "value"), over, unclipped, clipped, doubted, piece)
    return shares


def _norms(evidence: Evidence) -> dict[str, float]:
    """Return the norm of all logical gradients, where it can be known, and that of what this rank holds."""
    seen = evidence.tensors
    if not any(seen.with_slot("grad")) or any((name, "grad") not in seen for name in seen.with_slot("grad_unreduced")):
        return {}  # of a partial sum no rank knows the whole
    slot = "grad_unclipped" if any(seen.with_slot("grad_unclipped")) else "grad"
    own = {"own": math.sqrt(_total(evidence, slot))}
    if evidence.peers:
        before, after = logical_norms(evidence.peers, evidence.axes)
    elif all(evidence.axes <= evidence.over(name, "grad") for name in seen.with_slot("grad")):
        shares = _shares(evidence, {}).values()
        before, after = (math.hypot(*column) for column in zip(*((s.unclipped, s.clipped) for s in shares), strict=True))
    else:
        return own
    return own | {"unclipped": before, "clipped": after}
