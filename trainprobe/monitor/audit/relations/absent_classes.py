"""A class that is never a target loses its probability.

Judged for `cross_entropy` and `nll_loss` over 3 to 1,000 classes, with class indices as targets. At the minimum of the loss the
mean probability of a class is its share of the targets. A class is reported if it was no target in 30 or more audited steps,
and if all of this holds in the last 15 of them, compared with the 15 before:

- Its mean probability is at least a quarter of an equal share, and at least twice the share of label smoothing.
- Its probability no longer falls: it is 0.98 of the earlier one, or more.
- By this probability alone, 20 or more targets of this class were to be expected.
- The model has learned: the mean of -log p(target) is at most 0.75 of that of the first three audited steps. It no longer
  learns fast: this mean is at least 0.95 of the earlier one.

At most one class in ten (and at least one) may never be a target. The other classes show that the targets are classes of a
fixed list, and not positions, tokens or candidates. All losses of the step must be of this kind. With several ranks, the class
must have been no target on any.
Reported as warnings: a data set may lack a class. Usual causes are labels that begin at 1 while the model has n + 1 outputs,
outputs that fill up a shape, and a background class without labels. The logits are bounded in such models: by a sigmoid or tanh
before the loss, by cosines without a scale, or by a head without bias over features that average to 0. Without bounds the
probability of the class falls as long as the model learns.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.class_shares import WINDOW, ClassShares, observed
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCalls
from trainprobe.monitor.audit.messages import Rows, key_of

COST = frozenset({"host", "ranks"})
OBSERVERS = frozenset({"loss_inputs"})
STAGE = "forward"
_OF_EQUAL = 0.25
_OF_SMOOTHED = 2.0
_STANDS = 0.98
_EXPECTED = 20.0
_LEARNED = 0.75
_SETTLED = 0.95
_FEW = 10  # one class in so many


def check(evidence: Evidence) -> list[Finding]:
    """Find the class that takes the most probability of those that were never a target."""
    shares = remember(evidence)
    if shares is None or not evidence.of(LossCalls).losses:
        return []
    taking = [c for c in _taking(shares) if _nowhere_a_target(shares, c, evidence)]
    if not taking:
        return []
    mass, equal = shares.mass(latest=True), 1 / len(shares.counts)
    worst = max(taking, key=lambda c: mass[c])
    more = f" ({len(taking)} classes like it)" if len(taking) > 1 else ""
    text = (
        f"class {worst}{more} was never a target of {shares.kind} ({shares.counts.sum():,.0f} targets at {shares.steps} "
        f"audited steps), and still takes {mass[worst]:.2%} of the probability (an equal share is {equal:.2%}). This no longer "
        f"falls, though the mean -log p(target) fell from {shares.began:.3g} to {shares.surprise(latest=True):.3g}"
    )
    hint = (
        "check that labels count from 0, with one output for each class. If logits are bounded (by a sigmoid or tanh, or as "
        "cosines), remove the bound or scale them"
    )
    return [
        evidence.found(
            text,
            shares.kind,
            next=hint,
            measured=float(mass[worst]),
            expected=0.0,
            kind="scalar",
            names=[f"class {c}" for c in taking],
        )
    ]


def remember(evidence: Evidence) -> ClassShares | None:
    """Return how often each class was a target and what probability it had, while all losses are over the same classes."""
    return observed(evidence.remembered("absent_classes", None), evidence)


def shares(evidence: Evidence) -> Rows:
    """Return that this rank has such a loss, and the classes that were never a target of it."""
    shares = remember(evidence)
    if shares is None or not _is_a_list(shares):
        return {} if shares is None else {key_of(shares.name, "classes"): (1, 0.0)}
    return {key_of(shares.name, "classes"): (1, 0.0)} | {_key(shares, c): (1, 0.0) for c in shares.never}


def _taking(shares: ClassShares) -> list[int]:
    """Return the classes that were never a target and whose probability stays."""
    if shares.steps < 2 * WINDOW or not _is_a_list(shares):
        return []
    now, was = shares.surprise(latest=True), shares.surprise(latest=False)
    if not _SETTLED * was <= now <= _LEARNED * shares.began:
        return []
    latest, before = shares.mass(latest=True), shares.mass(latest=False)
    least = max(_OF_EQUAL, _OF_SMOOTHED * shares.smoothing) / len(shares.counts)
    return [
        c for c in shares.never if latest[c] >= max(least, _STANDS * before[c]) and latest[c] * shares.looked_at >= _EXPECTED
    ]


def _is_a_list(shares: ClassShares) -> bool:
    """Whether nearly all classes were targets."""
    return len(shares.never) <= max(1, len(shares.counts) // _FEW)


def _nowhere_a_target(shares: ClassShares, c: int, evidence: Evidence) -> bool:
    """Whether a class was a target on no rank, as far as the ranks were compared."""
    if evidence.place.world_size == 1:
        return True
    with_losses = [peer for peer in evidence.peers if key_of(shares.name, "classes") in peer.rows]
    return bool(with_losses) and all(_key(shares, c) in peer.rows for peer in with_losses)


def _key(shares: ClassShares, c: int) -> int:
    return key_of(f"{shares.name}: {c}", "never")
