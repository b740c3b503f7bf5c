"""Which calls of a recorded step a dump keeps, where that follows from their full names or from the order in which they ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name
from trainprobe.engine.plan.model import Plan

_FORWARD = ("forward", "recompute")


def selects(plan: Plan) -> bool:
    """Tell whether a plan leaves out calls by `scope`, `entries` or `phases`."""
    return plan.scope is not None or bool(plan.entries) or "forward" not in plan.phases


def selected(calls: Sequence[Call], plan: Plan, framework: str = "pytorch") -> tuple[list[Call], str]:
    """Return the calls that `scope`, `entries` and `phases` keep, in execution order, and what was missing (or "")."""
    kept, why = list(calls), ""
    if plan.scope is not None:
        kept, why = within(kept, *plan.scope, framework)
    if plan.entries:
        kept = [call for call in kept if any(text in name for name in _names(call, framework, plan) for text in plan.entries)]
    if "forward" not in plan.phases:
        kept = [call for call in kept if call.kind not in ("module", "op") or call.phase not in _FORWARD]
    return kept, why


def within(calls: Sequence[Call], first: str, last: str, framework: str = "pytorch") -> tuple[list[Call], str]:
    """Return the calls from the one named `first` up to the one named `last`, in execution order, and what was missing (or "").

    Names are those of a dump, such as `Module.layers.0.Block.forward.0`. Without `last` the stretch ends with the step.
    Modules whose forward encloses `first` and ends before `last` begins belong to the stretch; so do the gradients of the
    parameters of `last` where that is a backward call.
    """
    names = [entry_name(call, framework) for call in calls]
    if first not in names:
        return [], f"scope: {first!r} was not called in this step, so nothing of it is recorded"
    begin, missing = names.index(first), ""
    try:
        end = names.index(last, begin) + 1
    except ValueError:
        end, missing = len(calls), f"scope: {last!r} was not called after {first!r}: the scope extends to the end of the step"
    while end < len(calls) and calls[end].kind == "parameter" and calls[end].name == calls[end - 1].name:
        end += 1
    inside = list(calls[begin:end])
    unfinished = {id(call) for later in calls[end - 1 :] for call in _enclosing(later)}
    around = [call for call in _enclosing(calls[begin]) if id(call) not in unfinished]
    return [*reversed(around), *inside], missing


def _enclosing(call: Call) -> list[Call]:
    """Return the forward calls of modules that a forward call runs in, the innermost first."""
    found: list[Call] = []
    parent = call.parent
    while isinstance(parent, Call) and call.phase in _FORWARD:
        found.append(parent)
        parent = parent.parent
    return found


def _names(call: Call, framework: str, plan: Plan) -> Iterator[str]:
    """Yield a call's full name and, at level mix, the names of the calls that it runs in."""
    yield entry_name(call, framework)
    parent = call.parent
    while plan.level == "mix" and isinstance(parent, Call):
        yield entry_name(parent, framework, "backward" if call.phase == "backward" else parent.phase)
        parent = parent.parent
