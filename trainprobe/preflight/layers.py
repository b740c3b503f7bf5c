"""What is told of the layers of a model before it is trained: how sizes change with depth, what is dead, frozen, decayed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from torch import Tensor

from trainprobe.engine.core.words import and_more, counted
from trainprobe.preflight.subject import Seen, Subject

FEW = 3  # layers, from which they are a stack
MOST = 1e4  # factor between the gradients of the first layer and the last that no training gets over
TOLD = 0.1  # share of dead units from which it is told


def fault(seen: Seen, subject: Subject) -> str:
    """Return what keeps the layers of a model from being trained, "" where nothing does."""
    (name, share), found = _dead(seen, subject), _stack(seen, subject)
    averaged = any(hasattr(module, "running_mean") for module in subject.model.modules())  # their evaluation is another yet
    if share == 1.0 and not averaged:
        return f"all units of {name} are dead on this batch: they are 0, and so are their gradients"
    return _in_words(*found) if found is not None and not 1 / MOST < found[2] < MOST else ""


def _in_words(name: str, activations: float, gradients: float) -> str:
    told = f"over {name} activations of an evaluation change by the factor {activations:.3g}"
    return f"{told}, gradients on their way back by {gradients:.3g}"


def _stack(seen: Seen, subject: Subject) -> tuple[str, float, float] | None:
    """Return the longest row of numbered layers: its name, and two factors; None where there is none.

    The first is how many times as large activations are behind the last layer as behind the first, the second how many times as
    large gradients are in the first layer as in the last: the median of those that both have.
    """
    stacks, kinds = defaultdict[tuple[str, str], dict[int, Tensor]](dict), _kinds(subject)
    for name, output in seen.outputs:
        if (found := re.fullmatch(r"(.*\.)?(\d+)", name)) is not None:
            stacks[found[1] or "", kinds[name]].setdefault(int(found[2]), output)
    (prefix, kind), layers = max(stacks.items(), key=lambda item: len(item[1]), default=(("", ""), {}))
    if len(layers) < FEW:
        return None
    ends = min(layers), max(layers)
    sizes = [float(layers[i].double().square().mean().sqrt()) for i in ends]
    first, last = (_norms(subject, f"{prefix}{i}.") for i in ends)
    factors = [first[key] / last[key] for key in first if first[key] and last.get(key)]
    label = f"the {len(layers)} layers {prefix}{ends[0]} to {prefix}{ends[1]} ({kind})"
    return label, sizes[1] / max(sizes[0], 1e-30), median(factors or [1.0])


def _kinds(subject: Subject) -> dict[str, str]:
    """Return module, as outputs name it → its class."""
    return {subject.names[id(module)]: type(module).__name__ for module in subject.model.modules()}


def _norms(subject: Subject, prefix: str) -> dict[str, float]:
    own = ((name, gradient) for name, gradient in subject.base.gradients.items() if name.startswith(prefix))
    return {name.removeprefix(prefix): float(gradient.double().norm()) for name, gradient in own}


def _dead(seen: Seen, subject: Subject) -> tuple[str, float]:
    """Return the module with the largest share of units that are 0 for all of the batch, and that share."""
    kinds = _kinds(subject)
    shares = {name: _zeros(output) for name, output in seen.outputs if "relu" in kinds[name].lower()}
    return max(shares.items(), key=lambda item: item[1], default=("", 0.0))


def _zeros(output: Tensor) -> float:
    """Return the share of the units, channels of pictures, that are 0 everywhere."""
    units = output.movedim(1, -1) if output.dim() == 4 else output
    return float((units.flatten(0, -2) == 0).all(0).double().mean())


def remarks(seen: Seen, subject: Subject) -> Iterator[str]:
    """Yield what is no fault, and may be none that was meant."""
    model, (name, share) = subject.model, _dead(seen, subject)
    if (found := _stack(seen, subject)) is not None:
        yield _in_words(*found)
    if share > TOLD:
        yield f"{share:.0%} of the units of {name} are dead on this batch"
    still = [n for n, m in model.named_modules() if "Dropout" in type(m).__name__ and not m.training and getattr(m, "p", 0)]
    if still:
        yield f"{counted(len(still), 'dropout')} off ({still[0]} is in evaluation mode)"
    if frozen := [n for n, p in model.named_parameters() if not p.requires_grad]:
        yield f"{counted(len(frozen), 'parameter')} frozen ({frozen[0]})"
    norms = {id(p): f"{n}.{key}" for n, m in model.named_modules() for key, p in m.named_parameters(recurse=False)
             if key == "bias" or "norm" in type(m).__name__.lower()}  # fmt: skip
    groups = [group for optimizer in subject.optimizers for group in optimizer.param_groups if group.get("weight_decay")]
    if decayed := [norms[id(p)] for group in groups for p in group["params"] if id(p) in norms]:
        yield f"weight decay is on norms and biases, too: {and_more(decayed)}"
