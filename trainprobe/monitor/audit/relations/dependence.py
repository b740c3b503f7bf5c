"""An early output of a causal model does not depend on later inputs, nor on other rows.

Relation, for the first call with integers [rows, time] in the first audited steps in which this is checked. An output
[rows, time, …] at the places of the first half of the last row, weighted by fixed numbers, has a gradient of 0 with respect to

    later inputs of the row, if every attention of the call over these places is causal by itself: by its flag, its mask, or its
    triangular weights
    inputs a few places later, if there is no attention over these places and all targets are the next tokens
    inputs of other rows, if either holds

in whichever embedding the inputs are looked up (of several embeddings, all show it). Tolerance: 1e-6 of the largest gradient,
as a mask may be a large number and not infinity. Models with batch statistics are left out, and those whose tokens are
[time, rows] by their targets. Reported as a warning.
Usually caused by a mask that is added as ones and zeros, by a norm or a mean over time, by a convolution that is padded on both
sides, or by a reshape instead of a transpose. A bidirectional recurrent layer cannot be distinguished from an intended encoding
of the whole text, and is not reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import LossCalls
from trainprobe.monitor.audit.relations.shifted_targets import predicts_next

COST = frozenset({"rerun"})
OBSERVERS = frozenset({"dependence", "loss_inputs"})
STAGE = "forward"
PYTORCH_ONLY = "the output's dependence is read off PyTorch's graph"
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Reached:
    """Where the gradient of early outputs of the last row arrives."""

    name: str = ""
    """The module whose output this is."""
    all: float = 0.0
    """Its largest absolute element."""
    later: float = 0.0
    """The largest at later places of the row."""
    others: float = 0.0
    """The largest in other rows."""
    last: int = 0
    """The last place of the row with a gradient."""
    after: str = ""
    """The module that was given this output; empty where it was a part of its parent."""


@dataclass(frozen=True, slots=True)
class OutputDependence:
    """On which inputs early outputs depend."""

    argument: str = ""
    """The rows [rows, time] that the model was called with; empty where nothing was looked at."""
    time: int = 0
    """Their length."""
    attentions: int = 0
    """How many attentions over these places there were."""
    causal: int = 0
    """How many of them are causal by themselves, at least."""
    inputs: tuple[Reached, ...] = ()
    """What embeddings looked up."""
    outputs: tuple[Reached, ...] = ()
    """Outputs of modules, in the order in which these returned."""
    equal: Mapping[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])
    """Of constants by which places are turned, short dtype → how many places are above what it holds exactly, how many of these
    have the numbers of the place before, and how many of the others do."""


def check(evidence: Evidence) -> list[Finding]:
    """Find a dependence on what an output must not see."""
    seen = evidence.of(OutputDependence)
    if not seen.inputs:
        return []
    by_mask = 0 < seen.attentions <= seen.causal
    by_targets, time_first = (any(predicts_next(call, (dim,)) for call in evidence.of(LossCalls).losses) for dim in (1, 0))
    if time_first and not by_targets:
        return []
    ends = max(reached.last for reached in seen.inputs)
    near = by_targets and not seen.attentions and ends < seen.time - 1
    why = "every attention of the model is causal" if by_mask else "it is trained to predict the next token"
    if (by_mask or near) and all(reached.later > _TOLERANCE * reached.all for reached in seen.inputs):
        where, through = _through(seen.outputs, "later")
        text = (
            f"outputs of the first {seen.time // 2} places of {seen.argument} depend on its place {ends}{through}, though {why}"
        )
        hint = "look there for a mask that hides nothing, a mean over time, or padding on both sides"
        return [evidence.found(text, where, "output", next=hint, measured="depends", expected="does not depend", kind="module")]
    if (by_mask or by_targets) and all(reached.others > _TOLERANCE * reached.all for reached in seen.inputs):
        where, through = _through(seen.outputs, "others")
        text = f"an output depends on other rows of the batch{through}, though {why}. The rows are mixed"
        hint = "look there for a reshape in the place of a transpose, or for the batch and time taken for each other"
        return [evidence.found(text, where, "output", next=hint, measured="depends", expected="does not depend", kind="module")]
    return []


def _through(outputs: Sequence[Reached], kind: str) -> tuple[str, str]:
    """Return the module in which the dependence arises, and what is to be told of it.

    The gradient goes back from the last output: it arises between the last output that has it and the one behind.
    """
    leaks = [i for i, reached in enumerate(outputs) if getattr(reached, kind) > _TOLERANCE * reached.all]
    if not leaks:
        return "root", ""
    last = outputs[leaks[-1]]
    behind = next((reached.name for reached in outputs[leaks[-1] + 1 :] if reached.all), "root")
    if last.after and behind == last.after:
        return behind, f", through {behind}"
    shared = [a for a, b in zip(last.name.split("."), behind.split("."), strict=False) if a == b]
    parent = ".".join(shared) if last.name.split(".")[: len(shared)] == shared and shared else "root"
    return parent, f", between {last.name} and {'its end' if behind == 'root' else behind}"
