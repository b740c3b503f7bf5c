"""Tensor-parallel ranks draw the same random numbers outside their own regions; data-parallel ranks that drew others go on so.

Relation: ranks of a tp group whose random states were equal at the audited step before have equal ones now, and ranks of a dp
group whose states all differed then do not all have one now, where the forward pass draws. A step that draws does not end with
the random state of one of the last 32 audited steps. Tolerance none. Ranks that share a seed over dp from the start do so on
purpose.
Usually caused by a rank that drew a number more than the others (logging, data augmentation, a branch), after which dropout
masks of replicated activations differ; over dp by a resume that gives every rank the random state of one; and by a seed that is
set in each step, or by an evaluation that seeds and does not put the state back.
"""

from __future__ import annotations

from typing import NamedTuple

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.calls import RandomFingerprints

COST = frozenset({"ranks"})
OBSERVERS = frozenset({"model_calls", "random_states"})
STAGE = "forward"
_REMEMBERED = 32


def check(evidence: Evidence) -> list[Finding]:
    """Find random states that came apart over tp, or fell together over dp."""
    return [*_differing(evidence), *_together(evidence), *_again(evidence)]


def remember(evidence: Evidence) -> tuple[int, ...]:
    """Return the random states with which the last audited steps ended."""
    return (*_known(evidence), evidence.of(RandomFingerprints).ended)[-_REMEMBERED:]


def _known(evidence: Evidence) -> tuple[int, ...]:
    return evidence.remembered("random_streams", ())


def _again(evidence: Evidence) -> list[Finding]:
    random = evidence.of(RandomFingerprints)
    if random.begun in (0, random.ended) or random.ended not in _known(evidence):
        return []
    text = (
        f"step {evidence.step} drew random numbers and ended with a random state that a step before had ended with: it "
        "drew the same numbers again"
    )
    hint = "seed once, before the training; around an evaluation keep the random state and put it back"
    return _repeated(evidence, text, hint)


def _together(evidence: Evidence) -> list[Finding]:
    states = _states(evidence, "dp")
    if states is None or states.before < states.ranks or states.now > 1:
        return []
    text = (
        f"all ranks of the {states.group} have one random state, which differed at step {states.step}: their dropout masks "
        "are the same from now on"
    )
    hint = "save and load the random state of each rank by itself"
    return _repeated(evidence, text, hint)


def _repeated(evidence: Evidence, text: str, hint: str) -> list[Finding]:
    return [evidence.found(text, "random state", next=hint, measured="equal", expected="different", kind="scalar")]


def _differing(evidence: Evidence) -> list[Finding]:
    states = _states(evidence, "tp")
    if states is None or states.before > 1 or states.now == 1:
        return []
    text = f"random states differ in the {states.group} since step {states.step}, where they were equal"
    return [
        evidence.found(text, "random state", "value", measured="different", expected="equal", kind="scalar", severity="error")
    ]


class _States(NamedTuple):
    """How many different random states a group of ranks has now, and had at the audited step before, `step`."""

    group: str
    ranks: int
    step: int
    before: int
    now: int


def _states(evidence: Evidence, axis: str) -> _States | None:
    """Count the random states over an axis; None where no rank is compared, nothing is drawn, or no step was audited before."""
    axes = frozenset({axis})
    group = along(evidence, axes)
    if len(group) < 2 or evidence.before is None or not any(peer.marks["drawn"] for peer in group):
        return None
    earlier = {peer.rank: peer.marks["random"] for peer in evidence.before.peers}
    before, now = {earlier.get(peer.rank) for peer in group}, {peer.marks["random"] for peer in group}
    return _States(group_words(evidence, axes, group), len(group), evidence.before.step, len(before), len(now))
