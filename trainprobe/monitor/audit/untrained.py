"""Parameters that the training leaves alone: frozen ones, copies of a module, moving averages, and teachers."""

from __future__ import annotations

from collections.abc import Mapping

from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import TrainingCalls


def untrained_parameters(evidence: Evidence) -> frozenset[str]:
    """Return the parameters that nothing here trains: frozen ones, which an optimizer leaves as they are if it holds them, and
    those that no optimizer holds and no loss reaches, of a copy beside a trained module or of a teacher. A teacher runs with
    gradients disabled.
    """
    seen, parameters = evidence.tensors, evidence.model.parameters
    idle = [p for p in parameters if p.trainable and p.owned is False and (p.name, "grad") not in seen]
    unused = {p.name for p in idle}
    trained = {name: p.shape for p in parameters if p.trainable and p.name not in unused for name in p.names}
    copies = _copies({name: p.shape for p in idle for name in p.names}, trained) if idle and trained else ()
    taught = {p.name for p in idle if p.name.rpartition(".")[0] in evidence.of(TrainingCalls).asked}
    return frozenset(p.name for p in parameters if not p.trainable or p.name in copies or p.name in taught)


_Shapes = Mapping[str, tuple[int, ...]]  # by name of a parameter


def _copies(idle: _Shapes, trained: _Shapes) -> set[str]:
    """Return the idle parameters of modules that have the names and shapes of a module whose parameters are all trained.

    Elements of a list, such as the layers of a model, are no copies of each other.
    """
    found = set[str]()
    for name in idle:
        parts = name.split(".")
        for cut in range(1, len(parts) if name not in found else 0):
            mine, rest = ".".join(parts[:cut]), ".".join(["", *parts[cut:]])
            inside = _inside(mine, idle)
            likes = {other.removesuffix(rest) for other in trained if other.endswith(rest)}
            if any(not (_numbered(mine) and _numbered(other)) and _inside(other, trained) == inside for other in likes):
                found |= {f"{mine}.{inner}" for inner in inside}
                break
    return found


def _inside(module: str, shapes: _Shapes) -> dict[str, tuple[int, ...]]:
    return {name[len(module) + 1 :]: shape for name, shape in shapes.items() if name.startswith(f"{module}.")}


def _numbered(module: str) -> bool:
    return module.rpartition(".")[2].isdigit()


def averaged_parameters(evidence: Evidence) -> frozenset[str]:
    """Return the names of parameters beside those that are trained, such as those of a moving average: copies, and frozen ones
    that something moves.
    """
    untrained, driven = untrained_parameters(evidence), evidence.history.driven
    beside = (p for p in evidence.model.parameters if p.name in untrained and (p.trainable or driven.get(p.name, 0) > 0))
    return frozenset(name for p in beside for name in p.names)


def is_part_of(chosen: frozenset[str], place: str, evidence: Evidence) -> bool:
    """Tell whether the nearest module around a place that has parameters has none but the chosen ones."""
    if not chosen:
        return False
    names = [name for p in evidence.model.parameters for name in p.names]
    while True:
        inside = [name for name in names if name.startswith(f"{place}." if place else "")]
        if inside:
            return all(name in chosen for name in inside)
        place = place.rpartition(".")[0]
