"""A copy that follows the weights (average, target network, teacher) does so in all tensors, towards them, and with memory.

A copy of the model is a module, or a list or dict of tensors. In a step in which it changes, each of its tensors moves by one
share of its distance to the weights: e' = e + r (w − e), with 0 < r ≤ 1. r is fitted to a sample of elements by least squares.
Each of these is reported as a warning:

- r < 0: the copy moves away from the weights.
- 1/2 < r < 1 at three audited steps, equal within one percent: the copy has nearly no memory, as if the decay and its
  complement were exchanged. A warm-up of the decay varies r; r = 1 copies the weights, as target networks do.
- r = 0 in some tensors that differ from the weights, at two audited steps, while others follow: they are left out.
- Fewer than half of the elements that differ from the weights change, at two audited steps in 16 bits: the rest rounds away.
- It is written at two audited steps, differs from the weights and keeps its values: it is updated with itself.
- It moves towards another model of the same class that is watched too, at two audited steps, and not towards the one whose
  numbers it had.
- It does not change, and ran without gradients and with active dropout at four audited steps in a row: the outputs of a
  reference are then random.

A copy that does not change in evaluation mode violates nothing. An update between two steps is judged from two consecutive
audited steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS = frozenset({"followers"})
STAGE = "evaluation"
PYTORCH_ONLY = "copies of a model are searched for among PyTorch's modules"

FITS = 0.1  # of the movement: what a share of the distance may leave unexplained
_SHORT = ("float16", "bfloat16")
_RESTED = 3  # audited steps before


@dataclass(frozen=True, slots=True)
class FollowedTensor:
    """How one tensor of a copy moved in a step."""

    name: str
    """The parameter."""
    rate: float
    """The share of its distance to the weights by which it moved, by least squares."""
    residual: float
    """The part of the movement that this share does not explain, relative to its length."""
    moved: float
    """The share of sampled elements that changed."""
    away: float
    """The share of sampled elements that differed from the weights."""
    written: bool
    """Whether its version counter says that it was written in place."""


@dataclass(frozen=True, slots=True)
class Followed:
    """How a copy of the model moved in a step."""

    kind: str
    """Its class."""
    dtype: str
    """The dtype of its first parameter."""
    tensors: tuple[FollowedTensor, ...]
    """Its parameters."""
    dropped: bool = False
    """It ran without gradients, and a dropout within it was active."""
    by_another: bool = False
    """It moved towards another model of the class, and not towards its own."""
    number: int = 0
    """Of the copy, in the order in which they were found."""

    @property
    def rests(self) -> bool:
        """Nothing moved it, wrote to it or dropped in it."""
        return not self.dropped and not any(t.moved or t.written for t in self.tensors)


@dataclass(frozen=True, slots=True)
class FollowerSteps:
    """The copies of the model that are known."""

    copies: tuple[Followed, ...] = ()
    """Each, in the order in which they were found."""


def remember(evidence: Evidence) -> dict[int, dict[str, Any]]:
    """Return for each copy: the rate at the last audited steps, and how often in a row each other violation was seen."""
    found: dict[int, dict[str, Any]] = dict(evidence.remembered("followers", {}))
    for copy in evidence.of(FollowerSteps).copies:
        known, rate = found.get(copy.number, {}), _rate(copy.tensors)
        if copy.rests:  # as many do between updates that come now and then
            found[copy.number] = {name: count for name, count in known.items() if name != "drops"}
            continue
        seen = {name: known.get(name, 0) + 1 for name, tensors in _violations(copy) if tensors}
        found[copy.number] = {"rates": [*known.get("rates", []), *([rate] if rate else [])][-3:], **seen}
    return found


def check(evidence: Evidence) -> list[Finding]:
    """Find copies that do not follow as they should."""
    found: list[Finding] = []
    for copy in evidence.of(FollowerSteps).copies:
        known: dict[str, Any] = evidence.remembered("followers", {}).get(copy.number, {})
        for name, tensors in _violations(copy):
            if tensors and known.get(name, 0) >= (_RESTED if name == "drops" else 1):
                found.append(_finding(evidence, copy, name, tensors))
                break
        else:
            rates = [*known.get("rates", []), _rate(copy.tensors)]
            if len(rates) >= 3 and all(0.5 < r < 0.999 for r in rates) and max(rates[-3:]) - min(rates[-3:]) < 0.01:
                found.append(_finding(evidence, copy, "memory", list(copy.tensors)))
    return found


def is_led(tensors: Sequence[FollowedTensor]) -> bool:
    """Tell whether a copy as a whole moved towards the weights that it was held against."""
    return 0 < _rate(tensors) <= 1


def _rate(tensors: Sequence[FollowedTensor]) -> float:
    """Return the rate of a copy that follows as a whole; 0 where it does not."""
    rates = [t.rate for t in tensors if t.moved and t.residual < FITS]
    return median(rates) if len(rates) * 2 > len(tensors) else 0.0


def _violations(copy: Followed) -> Iterator[tuple[str, list[FollowedTensor]]]:
    """Yield each kind of violation with the tensors that show it."""
    away = [t for t in copy.tensors if t.away > 0.5]
    fitting = [t for t in away if t.moved and t.residual < FITS]
    yield "away", [t for t in fitting if t.rate < 0] if 2 * len(fitting) > len(away) else []
    yield "another", list(copy.tensors) if copy.by_another else []
    still = [t for t in away if not t.moved]
    follows = [t for t in fitting if 0 < t.rate <= 1]
    yield "itself", still if len(still) == len(away) and all(t.written for t in still) else []
    yield "drops", list(copy.tensors) if copy.dropped and not any(t.moved or t.written for t in copy.tensors) else []
    short = copy.dtype in _SHORT
    lost = [t for t in away if short and t.moved < t.away / 2]
    yield "rounded", lost if any(t.moved for t in copy.tensors) and 2 * len(lost) > len(away) else []
    yield "left", still if follows and still and len(follows) + len(still) == len(away) else []


def _finding(evidence: Evidence, copy: Followed, name: str, tensors: list[FollowedTensor]) -> Finding:
    rate = median([t.rate for t in tensors])
    whole = f"a copy of the model ({copy.kind}) that is to follow its weights"
    text, measured, expected, hint = {
        "away": (
            f"{whole} moves away from them, by {-rate:.3g} of the distance in a step",
            rate,
            "a share between 0 and 1",
            "the sign of the update is wrong: average += (1 - decay) * (weight - average)",
        ),
        "memory": (
            f"{whole} keeps {1 - rate:.3g} of itself in a step. Its decay is so small that it averages nothing",
            1 - rate,
            "a decay near 1",
            "decay and 1 - decay are exchanged: average = decay * average + (1 - decay) * weight",
        ),
        "another": (
            f"{whole} moves towards another model of its class in their place",
            "follows another model",
            "follows the model whose numbers it had",
            "pair each copy with its own model where the copies are updated",
        ),
        "itself": (
            f"{whole} is updated with its own numbers. It is written in each step and never changes",
            "unchanged",
            "moves towards the weights",
            "update the copy from the model: copy.load_state_dict(model.state_dict())",
        ),
        "drops": (
            f"a copy of the model ({copy.kind}) that rests is in training mode and drops out: what it says is random",
            "training mode",
            "evaluation mode",
            "call eval() on the reference after it is copied",
        ),
        "rounded": (
            f"{whole} is kept in {copy.dtype}, where its updates round away. Most elements that differ from the weights stay",
            max(t.moved for t in tensors),
            "all elements that differ",
            "keep the average in float32",
        ),
        "left": (
            f"{whole} follows in some tensors, and not in {and_more([t.name for t in tensors])}",
            "unchanged",
            "moves as the others",
            "update the copy over all parameters, those with one dimension too",
        ),
    }[name]
    return evidence.found(text, [t.name for t in tensors], next=hint, measured=measured, expected=expected)
