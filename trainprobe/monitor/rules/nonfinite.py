"""Names the origin of a NaN or an infinity: the first call with finite inputs and a non-finite output.

The rule walks the step in execution order. In the forward pass, an origin is a call with finite inputs and parameters and a
non-finite output. In the backward pass, it has finite gradients of outputs and a non-finite gradient of an input or parameter.
In the optimizer, the gradients are finite and an update, state or parameter is not. The loss is the origin if the forward pass
was finite and the loss or the first incoming gradient is not. Of nested modules the innermost is named.
If the first non-finite value is an input of a forward call and a result of the forward pass is not finite, only a call that is
known to have made such a result from finite values is an origin. If there is none, the batch had it.
Minus infinity alone does not count, because attention masks contain it. Values that stay inside single calls (a constant, a
mask, uninitialised memory) are a note, and no origin later. Under a dynamic loss scale, infinite gradients are how the scaler
finds its limit: a few such steps are a note. So are up to 32 steps before the first finite one at a scale above 65536, where a
float16 gradient of 1 overflows. They are an error if the optimizer stepped and wrote them into weights.

Source: the "first divergence" of TrainCheck and the overflow checks of mixed precision training (Micikevicius et al., 2018).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from trainprobe.engine.core.addresses import Address
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import Bools, Frame, Health
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.nonfinite_values import (
    ENTERS,
    backward_begins,
    is_input,
    not_known,
    of_forward,
    of_interest,
    stays_inside,
)
from trainprobe.monitor.rules import RuleOptions, Severity
from trainprobe.monitor.scalar_names import role_of, scalar

_MASKING = frozenset({"masked_fill", "where", "fill", "triu", "tril", "index_fill", "scatter", "setitem", "copy"})
_HIGHEST = 65536.0  # loss scale; where float16 ends
_SEARCH = 32  # steps; a search from 2^32, the highest scale that trainers begin with, is over by then
_STEPPED = ". The optimizer stepped all the same"
_SKIPS = "call scaler.step(optimizer), and not optimizer.step(): it skips a step whose gradients are not finite"
_PASS = {"forward": "forward pass", "recompute": "recomputed forward pass", "backward": "backward pass"}


class Options(RuleOptions):
    """Settings of the rule `nonfinite`."""

    severity: Severity = "error"
    """The severity of findings of this rule."""
    scaler_patience: int = 3
    """So many steps in a row may have infinite gradients at a loss scale above 1; at the start, above 65536, any number."""


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Name the origin when a step has the first non-finite value after a finite step."""
    bad = frame.health >= Health.INFINITE
    if bad.any() and stays_inside(frame, bad):
        memory.numbers["bad"] = 0.0
        new = not_known(frame, memory, bad, learn=True)
        return [_note(frame, bad)] if new.any() else []
    bad = of_interest(frame, memory, bad)
    before = memory.numbers.get("bad", 0.0)
    memory.numbers["bad"] = before + 1 if bad.any() else 0.0
    if not bad.any():
        memory.numbers["settled"] = max(memory.numbers.get("settled", 0.0), float(_scale(frame) > 1))
        return []
    scaled = _only_gradients_under_a_scale(frame, bad)
    reported = memory.numbers.get("told", 0.0) if before else 0.0
    tried = memory.numbers.get("tried", 0.0) if before else 0.0
    severe = not scaled or tried >= options.scaler_patience
    searching = scaled and _scale(frame) > _HIGHEST and not memory.numbers.get("settled", 0.0) and before < _SEARCH
    memory.numbers["tried"] = tried + (not searching)
    level = 2.0 if severe else 1.0
    memory.numbers["told"] = max(reported, level)
    seen = _is_recorded(frame.table.addresses[s] for s in frame.addresses.tolist())
    if reported >= level and not (seen and memory.numbers.get("unseen", 0.0)):
        return []
    memory.numbers["unseen"] = float(not (seen or scaled or _is_in_weights(frame, bad)))
    after = ". The loss scaler skips such a step and lowers the scale" if scaled else ""
    if scaled and severe and before:
        after = f". The loss scaler skipped the {int(before)} steps before it too: nothing is learnt"
    if not scaled and _was_not_skipped(frame, bad):
        after = f"{_STEPPED} and wrote it into weights, where a loss scaler skips such a step"
    return [_finding(frame, bad, options.severity if severe else "info", after)]


def wants_forward(memory: Memory) -> bool:
    """Tell whether the forward pass of the next step may show the origin: it was not recorded, and the weights are finite."""
    return lasts(memory) and memory.numbers.get("unseen", 0.0) > 0


def lasts(memory: Memory) -> bool:
    """Tell whether this step has non-finite values too."""
    return memory.numbers.get("bad", 0.0) > 0


def _only_gradients_under_a_scale(frame: Frame, bad: np.ndarray) -> bool:
    """Tell whether all that is bad are gradients, and what is made of them before an update that does not come."""
    if not _scale(frame) > 1 or _loss_is_bad(frame):
        return False
    addresses = [frame.table.addresses[s] for s in frame.addresses.tolist()]
    begins = backward_begins(addresses)
    ends = max((i for i, a in enumerate(addresses) if a.phase == "backward" and a.kind != "parameter"), default=len(addresses))
    after = {"collective": begins, "op": ends}  # the scaler's own ops are given the gradients
    return all(
        addresses[i].phase in ("backward", "step") or i > after.get(addresses[i].kind, len(addresses))
        for i in np.flatnonzero(bad).tolist()
    )


def _was_not_skipped(frame: Frame, bad: Bools) -> bool:
    """Tell whether gradients under a loss scale are not finite, the loss is, and the optimizer wrote them into weights."""
    if not _scale(frame) > 1 or _loss_is_bad(frame):
        return False
    addresses = [frame.table.addresses[s] for s in frame.addresses[np.flatnonzero(bad)].tolist()]
    return addresses[0].phase == "backward" and any(a.phase == "optimizer" and a.kind == "parameter" for a in addresses)


def _scale(frame: Frame) -> float:
    return scalar(frame.scalars, "loss scale") or 0.0


def _loss_is_bad(frame: Frame) -> bool:
    loss = scalar(frame.scalars, "loss")
    return loss is not None and not np.isfinite(loss)


def _is_in_weights(frame: Frame, bad: Bools) -> bool:
    """Tell whether a weight is not finite, before the step or after its update: whatever uses it is not either."""
    addresses = [frame.table.addresses[s] for s in frame.addresses[np.flatnonzero(bad)].tolist()]
    return any(a.kind == "parameter" and a.phase in ("forward", "optimizer") for a in addresses)


def _note(frame: Frame, bad: Bools) -> Finding:
    """Return the note on values that do not matter."""
    address = frame.table.addresses[int(frame.addresses[np.flatnonzero(bad)[0]])]
    what = "NaN" if frame.health[bad].max() == Health.NAN else "infinity"
    text = (
        f"step {frame.step} has {what} in {describe(address)} alone. No module output, gradient, parameter or loss has it: "
        "it counts as a constant, a mask or uninitialised memory"
    )
    return Finding("nonfinite", "info", text, frame.step, frame.place, address.site(), what, "finite")


def _finding(frame: Frame, bad: Bools, severity: Severity, after: str) -> Finding:
    address, how = find_origin(frame, bad)
    worst = frame.health[frame.addresses == frame.table.address(address)].max(initial=Health.INFINITE)
    what = "NaN" if worst == Health.NAN else "infinity"
    text = f"the first {what} of step {frame.step} is in {describe(address)}. {how[0].upper()}{how[1:]}{after}"
    return Finding(
        rule="nonfinite",
        severity=severity,
        message=text,
        step=frame.step,
        place=frame.place,
        site=address.site(),
        measured=what,
        expected="finite",
        next=_SKIPS if after.startswith(_STEPPED) else _next(address, frame.step) or _not_seen(frame, bad),
    )


def _next(address: Address, step: int) -> str | None:
    if address.phase == "forward" and address.kind == "parameter":
        return f"look at the gradients and the learning rate of step {step - 1}, and at what writes to weights between steps"
    if address.phase == "forward" and is_input(address):
        return f"look at the batch of step {step}, and at what prepares it"
    if address.kind == "collective":
        return "`trainprobe nan-trace {output}` names the rank that made it"
    if address.kind == "op":
        return (
            f"look at the inputs of this op in {{output}}/step{step}/rank*/dump.json, and at its call in stack.json beside it"
        )
    return None


def _not_seen(frame: Frame, bad: Bools) -> str:
    """Return what to do where the forward pass was not recorded, or modules alone: what comes next shows it, or a new run."""
    again = (
        f"load an earlier checkpoint and repeat step {frame.step} with `record: mix, step: [{frame.step}], output: again`. "
        "Then `trainprobe nan-trace again` names the call"
    )
    if all(address.kind == "scalar" for address in frame.table.addresses):
        return "scalars alone were recorded: `trainprobe run -- …` of the same script names the module"
    if _is_recorded(frame.table.addresses[s] for s in frame.addresses.tolist()):
        return again
    if _is_in_weights(frame, bad):
        return f"the update wrote it into the weights, so later steps cannot show its origin. To find it, {again}"
    return f"the next step's forward pass is recorded and names the module if the NaN comes again. If not, {again}"


def find_origin(frame: Frame, chosen: Bools | None = None) -> tuple[Address, str]:
    """Return the first place where finite values gave a non-finite one, and how it came about, in words.

    The frame must hold a value that is not finite. chosen: which of its values are to be taken for such, by default all.
    """
    addresses = [frame.table.addresses[s] for s in frame.addresses.tolist()]
    bad = (frame.health >= Health.INFINITE if chosen is None else chosen).tolist()
    first_bad = next(address for address, b in zip(addresses, bad, strict=True) if b)
    paired = list(zip(addresses, bad, strict=True))
    ordered = [(entered, result) for result, entered_bad, entered in _calls(addresses, bad) if not entered_bad]
    if _came_in(paired, first_bad):
        ordered = [(entered, result) for entered, result in ordered if entered and of_forward(result)]
    weight = next((address for address, b in paired if b and address.kind == "parameter" and address.phase == "forward"), None)
    if weight is not None:  # no call of the step makes one, and whatever uses it is not finite either
        return weight, (
            "it was not finite before the step began: the update of an earlier step wrote it, or something between the steps"
        )
    between = _between_the_passes(paired, first_bad, _batch_of(frame))
    if between is not None:
        return between
    if not ordered:
        return (
            first_bad,
            "it is in the first recorded value of the step, so the data or an earlier step made it",
        )
    inner = _innermost(ordered[0][1], [result for _, result in ordered])
    if (lowest := _minus_infinity_before(frame, addresses, inner)) is not None:
        return lowest, "its inputs were finite and it returned minus infinity, which the following operations spread"
    if inner.kind == "op" and inner.phase == "forward" and addresses.index(inner) > _ends(addresses):
        return inner, "it was made between the backward pass and the update: by clipping, or by what the optimizer prepares"
    how = _how(inner, next(entered for entered, result in ordered if result == inner), addresses, _batch_of(frame))
    return inner, how + _between_modules(inner, paired)


def _between_modules(origin: Address, paired: list[tuple[Address, bool]]) -> str:
    """Say between which parts of a module it was made, where a part was given it and none made it: in the module's own code."""
    prefix = "" if origin.name in ("", "root") else f"{origin.name}."
    parts = [(a, b) for a, b in paired if a.kind == "module" and a.phase == "forward" and a.name.startswith(prefix)]
    parts = [(a, b) for a, b in parts if a.name not in (origin.name, "", "root")]
    given = next((place for place, (address, b) in enumerate(parts) if b and is_input(address)), None)
    if origin.kind != "module" or origin.phase != "forward" or given is None:
        return ""
    first = parts[given][0].name
    before = [a.name for a, b in parts[:given] if not (b or is_input(a)) and a.name.count(".") == first.count(".")]
    behind = f", behind {before[-1]}" if before else ""
    return f", in its own code: {first} is the first submodule that gets it{behind}"


def _minus_infinity_before(frame: Frame, addresses: list[Address], origin: Address) -> Address | None:
    """Return the op that made the minus infinity which `origin` is given, unless that is a mask: the logarithm of a zero."""
    masked = (frame.health == Health.MINUS_INFINITY).tolist()
    given = [b for address, b in zip(addresses, masked, strict=True) if _owner(address) == _owner(origin) and is_input(address)]
    if origin.kind != "op" or not any(given):
        return None
    end = addresses.index(origin)
    made = [address for address, entered_bad, entered in _calls(addresses[:end], masked[:end]) if entered and not entered_bad]
    made = [address for address in made if address.kind == "op"]
    return None if not made or any(address.name.rpartition(".")[2].strip("_") in _MASKING for address in made) else made[-1]


def _ends(addresses: list[Address]) -> int:
    """Return where the last value of a backward pass stands, or behind everything where there is none."""
    return max((i for i, address in enumerate(addresses) if address.phase == "backward"), default=len(addresses))


def _came_in(paired: list[tuple[Address, bool]], first_bad: Address) -> bool:
    """Tell whether the first bad value was given to the step and reached the result of a forward call.

    A backward pass through such a result makes bad gradients of finite ones, and a call of which nothing that it was given is
    known has a bad result: neither is an origin then.
    """
    entered = first_bad.phase == "forward" and first_bad.kind != "parameter" and is_input(first_bad)
    return entered and any(b and of_forward(address) and not is_input(address) for address, b in paired)


def _batch_of(frame: Frame) -> str:
    """Name the batch of a step whose gradients or loss are not finite: those of several ranks may be joined already."""
    whose = f"rank {frame.place.rank}" if frame.place.world_size == 1 else f"one of the {frame.place.world_size} ranks"
    return f"The batch of step {frame.step} on {whose}"


def _between_the_passes(paired: list[tuple[Address, bool]], first_bad: Address, batch: str) -> tuple[Address, str] | None:
    """Return the loss, or the first gradient that came back, when it was made between the forward and the backward pass."""
    passes = [(address, b) for address, b in paired if of_forward(address)]
    if any(b for _, b in passes):
        return None
    recorded = _is_recorded(address for address, _ in passes)
    weights = "the weights were finite, " if passes and not recorded else ""
    seen = "the forward pass was finite" if recorded else f"{weights}the forward pass was not recorded"
    loss = next((address for address, b in paired if b and address.kind == "scalar" and role_of(address.name) == "loss"), None)
    if loss is not None and not recorded:
        return loss, f"{seen}. {batch} had it, or the forward pass or the loss made it"
    if loss is not None:
        return loss, f"{seen}, the loss made it"
    if first_bad.phase == "backward" and first_bad.slot.split(".")[0] in ENTERS["backward"]:
        return first_bad, f"{seen}. The gradient that came from the loss or the next pipeline stage had it"
    return None


def _calls(addresses: list[Address], bad: list[bool]) -> Iterable[tuple[Address, bool, bool]]:
    """Yield (its first bad result, whether what entered was bad, whether anything entered) for calls with a bad result."""
    paired = list(zip(addresses, bad, strict=True))
    for _, group in groupby(paired, key=lambda pair: _owner(pair[0])):
        members = list(group)
        enters = [b for address, b in members if is_input(address)]
        results = [address for address, b in members if b and not is_input(address)]
        if results:
            yield results[0], any(enters), bool(enters)


def _owner(address: Address) -> tuple[object, ...]:
    """Return what joins the values of one call: a module's parameters belong to its forward call."""
    name = address.name.rpartition(".")[0] if address.slot == "value" and address.kind == "parameter" else address.name
    return (address.phase, name, address.call, address.slot if address.phase == "optimizer" else "")


def _innermost(first: Address, candidates: list[Address]) -> Address:
    """Go down from the first origin to the innermost module inside it that is an origin too."""
    here = first
    for address in candidates[candidates.index(first) + 1 :]:
        inside = address.kind == "op" or here.name in ("", "root") or address.name.startswith(f"{here.name}.")
        if address.phase == first.phase and here.kind == "module" and inside:
            here = address
    return here


def _is_recorded(forward: Iterable[Address]) -> bool:
    """Tell whether anything but weights was seen of a forward pass."""
    return any(of_forward(address) and address.kind != "parameter" for address in forward)


def _how(address: Address, entered: bool, addresses: list[Address], batch: str) -> str:
    if address.kind == "collective":
        return "what this rank gave was finite: another rank gave it, or a sum overflowed"
    if address.kind == "scalar":
        return "everything else that was collected in this step is finite"
    if address.phase == "optimizer":
        return "the gradients were finite, the optimizer made it"
    if address.slot.startswith("grad") and address.kind == "parameter":
        loss = any(other.kind == "scalar" and role_of(other.name) == "loss" for other in addresses)
        if not (_is_recorded(addresses) or loss):
            return f"neither the forward pass nor the loss was recorded. {batch} had it, or a pass made it"
        return f"the {'forward pass' if _is_recorded(addresses) else 'loss'} was finite, the backward pass made it"
    known = "its inputs were finite" if entered else "what went into it was not collected"
    return f"{known}, the {_PASS.get(address.phase, address.phase)} made it"


def describe(address: Address) -> str:
    """Name a place in words."""
    if address.kind == "scalar":
        return address.name
    return f"{address.kind} {address.name or '(the whole model)'}, {address.slot.replace('_', ' ')}"
