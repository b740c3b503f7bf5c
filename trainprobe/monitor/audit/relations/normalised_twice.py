"""Probabilities are normalised once.

Relation: in the graph of the loss of a step's first backward pass, no softmax is taken of another softmax along the same
dimension. Between them stand at most copies and changes of the dtype. Tolerance none. Reported as a warning.
Usually caused by a router whose logits are probabilities already (transformers issue 45111), or by a loss that normalises what
the model has normalised: shares come out nearly equal, and the gradient is small. What a loss function of torch is given is
judged by `loss_inputs`.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.gradients import LossGraphs

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_graph"})
STAGE = "forward"
PYTORCH_ONLY = "it is read from torch's autograd graph, and MindSpore shows no graph"


def check(evidence: Evidence) -> list[Finding]:
    """Find a softmax of a softmax."""
    name = evidence.of(LossGraphs).normalised_twice
    if not name:
        return []
    text = f"a softmax is taken of a softmax, behind {name}: probabilities come out nearly equal"
    hint = "take the softmax of the logits, once"
    return [evidence.found(text, name, next=hint, measured="softmax twice", expected="once")]
