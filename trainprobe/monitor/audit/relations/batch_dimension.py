"""A layer over sequences does not confuse the batch with another dimension.

Judged for torch's recurrent and attention layers that are given [a, b, features], with a ≠ b and both at least 2. Every loss
function of the step must have one target a row, [N] or [N, k]. The batch dimension of the layer is the second, or with
`batch_first` the first. It has N entries if one of the two dimensions has, and if no dimension of a target has the size of the
other. Rows may be folded together with another dimension: a multiple of N is right too, unless the model itself is called with
[a, b, …]. No tolerance; at this audited step and the one before. Reported as a warning.

Usually caused by a missing `batch_first=True` for data [batch, time, features]. Each row of the batch then counts as a moment
of time, and mixes with the rows before it. A layer whose `batch_first` fits its data cannot violate this. Nothing is judged if
the loss is written by hand, or if there are as many rows as moments.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import GivenInputs, LossCalls, SequenceInput

COST = frozenset({"host"})
OBSERVERS = frozenset({"loss_inputs", "module_inputs"})
STAGE = "forward"


def check(evidence: Evidence) -> list[Finding]:
    """Find layers that mix the rows of the batch."""
    before = evidence.before
    known = {s.name for s in _wrong(before)} if before is not None else set[str]()
    wrong = [s for s in _wrong(evidence) if s.name in known]
    if not wrong:
        return []
    first, names = wrong[0], [s.name for s in wrong]
    batch, time = _dimensions(first)
    text = (
        f"{and_more(names)} ({first.kind}, batch_first={first.batch_first}) takes {list(first.shape)} for {batch} rows of "
        f"{time} time steps, and the loss has {time} targets. It reads the batch dimension as time"
    )
    hint = f"set batch_first={not first.batch_first}, or transpose what the layer is given and what it returns"
    return [
        evidence.found(
            text, first.name, "input", next=hint, measured=float(batch), expected=float(time), kind="module", names=names
        )
    ]


def _wrong(evidence: Evidence) -> list[SequenceInput]:
    targets = [call.shapes[1] for call in evidence.of(LossCalls).losses]
    if not targets or any(len(shape) not in (1, 2) for shape in targets):
        return []
    return [s for s in evidence.of(GivenInputs).sequences if _is_swapped(s, targets)]


def _is_swapped(seen: SequenceInput, targets: list[tuple[int, ...]]) -> bool:
    batch, time = _dimensions(seen)
    folded = not seen.as_called and batch % time == 0  # rows times something, as of windows or sentences
    return batch != time and min(batch, time) > 1 and not folded and all(t[0] == time and batch not in t for t in targets)


def _dimensions(seen: SequenceInput) -> tuple[int, int]:
    first, second = seen.shape[:2]
    return (first, second) if seen.batch_first else (second, first)
