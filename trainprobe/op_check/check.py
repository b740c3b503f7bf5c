"""One call, judged: each of its outputs, and each gradient that it handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from trainprobe.op_check.autocast import autocast, takes_mixed_formats
from trainprobe.op_check.cases import Case, NotChecked, Tensor, flat
from trainprobe.op_check.causes import likely
from trainprobe.op_check.error_locations import furthest
from trainprobe.op_check.evaluate import Expectation, Expected, Reference
from trainprobe.op_check.functions import api, is_in_place
from trainprobe.op_check.judge import Judgement, Tolerance, gravest, judge
from trainprobe.op_check.large_products import parts, told
from trainprobe.op_check.measure import far
from trainprobe.op_check.modes import recognised
from trainprobe.op_check.mutations import overwritten_arguments, statistics, written_beside
from trainprobe.op_check.noise import UNIT
from trainprobe.op_check.properties import (
    DROPOUTS,
    UNWRITTEN,
    ambiguous_gradient,
    at_borders,
    dropout_gradient,
    signed_zeros,
    tied,
    unspecified,
)
from trainprobe.op_check.references import formulas
from trainprobe.op_check.rerun import SOURCE as RUN_AGAIN
from trainprobe.op_check.rerun import rerun_from_state
from trainprobe.op_check.run import SINGLE

Direction = Literal["forward", "backward"]
# their results depend on the number format itself, or on memory that no argument shows
_BY_FORMAT = frozenset(
    {"nextafter", "frexp", "nan_to_num", "as_strided", "as_strided_copy", "as_strided_scatter", "set", "data"}
)


# signs, phases and order of what they return are a matter of the algorithm
_DECOMPOSITIONS = frozenset(
    """
    linalg_eigh linalg_eig eig svd linalg_svd qr linalg_qr geqrf lu linalg_lu linalg_lu_factor linalg_lu_factor_ex
    linalg_ldl_factor linalg_ldl_factor_ex lobpcg
    """.split()  # noqa: SIM905
)


@dataclass(slots=True)
class Checked:
    """One direction of one call. judgements: one a result. source: what it was judged against. note: what was assumed."""

    direction: Direction
    judgements: Sequence[Judgement] = ()
    source: str = ""
    note: str = ""
    expectation: Expectation | None = field(default=None, repr=False)

    @property
    def worst(self) -> Judgement:
        """Return the gravest of its judgements."""
        return gravest(list(self.judgements))


def check(case: Case, backward: bool = False, tolerance: Tolerance | None = None, *, whole: bool = False) -> Checked:
    """Judge the outputs of a call, or the gradients that it handed on.

    tolerance: judge floats by it instead of the bound. whole: judge all elements of large products of matrices, where else
    some rows are judged and sums of the others; only then is an expectation of these returned.
    """
    recorded = case.results if backward else [*case.outputs, *flat(dict(case.written))]
    if not backward and (case.unwritten or api(case.name) in UNWRITTEN):
        return Checked("forward", [Judgement("unspecified", "memory that nobody has written yet")], "properties")
    direction: Direction = "backward" if backward else "forward"
    case = _in_the_format_of_autocast(case) if backward else case
    if all(o is None for o in recorded):
        return Checked(direction, [Judgement("not checked", "the dump does not hold the values that it wrote or returned")])
    found = None if whole or tolerance is not None else _by_rows(case, direction)
    found = found or _guarded(case, direction, tolerance)
    overwritten = overwritten_arguments(case)
    return replace(found, judgements=[*found.judgements, *overwritten]) if overwritten else found


def _by_rows(case: Case, direction: Direction) -> Checked | None:
    """Judge a large product of matrices by some of its rows; None for all other calls."""
    backward = direction == "backward"
    try:
        found = parts(case, backward)
        if found is None:
            return None
        judged = [_guarded(part.smaller, direction, None) for part in found]
    except (NotChecked, RuntimeError, TypeError, ValueError, IndexError):
        return None  # the whole call says why
    if any(len(one.judgements) != 1 for one in judged):
        return None
    judgements = [part.back(one.judgements[0]) for part, one in zip(found, judged, strict=True)]
    return Checked(direction, judgements, judged[0].source, "; ".join(x for x in (judged[0].note, told(found)) if x))


def _in_the_format_of_autocast(case: Case) -> Case:
    """Return a backward with its gradients as the operator gave them: what autocast cast before it is cast back after it."""
    low = autocast(case)
    if low is None and takes_mixed_formats(case):
        low = case.tensors()[0].dtype  # some kernels add up the gradients of weights in it
    if low is None:
        return case

    def given(t: Tensor | None) -> Tensor | None:
        if t is None or t.dtype != torch.float32:
            return t
        narrow = t.to(low)
        return narrow if torch.equal(narrow.to(t.dtype), t) else t

    return replace(case, results=[given(t) for t in case.results])


def _guarded(case: Case, direction: Direction, tolerance: Tolerance | None) -> Checked:
    """Judge one direction; what torch refuses to compute here is not checked, with torch's reason."""
    if api(case.name) in _BY_FORMAT:
        return Checked(direction, [Judgement("not checked", "its result depends on the number format or the layout in memory")])
    if api(case.name) in _DECOMPOSITIONS:
        text = "a decomposition has several right answers, and none of their properties is checked yet"
        return Checked(direction, [Judgement("not checked", text)])
    try:
        return _forward(case, tolerance) if direction == "forward" else _backward(case, tolerance)
    except NotChecked as why:
        return Checked(direction, [Judgement("not checked", str(why))])
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, KeyError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        return Checked(direction, [Judgement("not checked", f"torch cannot run it here with these arguments: {text}")])


def _forward(case: Case, tolerance: Tolerance | None) -> Checked:
    known = unspecified(case)
    if known is None or gravest(known).outcome == "unspecified":
        again = rerun_from_state(case)
        if again:
            return Checked("forward", again, RUN_AGAIN, "its numbers are drawn from the recorded state of the generator")
    if known is not None:
        return Checked("forward", known, "properties")
    if case.written and not case.outputs:
        return _against(case, [*flat(dict(case.written))], Reference(case), False, tolerance)
    found = _against(case, case.outputs, Reference(case), False, tolerance)
    if case.written:
        found.judgements = [*found.judgements, *_written(case, tolerance)]
    return found


def _written(case: Case, tolerance: Tolerance | None) -> Sequence[Judgement]:
    """Judge what a call wrote into its arguments beside its result."""
    try:
        beside = statistics(case) or written_beside(case)
        return () if beside is None else _against(beside, beside.outputs, Reference(beside), False, tolerance).judgements
    except (NotChecked, RuntimeError, TypeError, ValueError, IndexError, KeyError) as why:
        text = (str(why).splitlines() or [type(why).__name__])[0][:160]
        return [Judgement("not checked", f"what it wrote into its arguments: {text}")]


def _backward(case: Case, tolerance: Tolerance | None) -> Checked:
    again = rerun_from_state(case, True)
    if again:
        return Checked("backward", again, RUN_AGAIN, "its numbers are drawn from the recorded state of the generator")
    why = ambiguous_gradient(case)
    if not why and case.gradients is not None and all(g is None for g in case.gradients):
        why = "the gradient of its result is not recorded"
    if api(case.name) in DROPOUTS:
        return Checked("backward", [dropout_gradient(case)], "properties")
    if why:
        return Checked("backward", [Judgement("not checked", why)])
    reference = Reference(case, True)
    if is_in_place(case.name) and _at_a_view(case, reference.expectation()):
        raise NotChecked("it writes through a view, and the gradient is recorded at that view")
    return _against(case, case.results, reference, True, tolerance)


def _at_a_view(case: Case, expectation: Expectation) -> bool:
    """Return whether a view's node handed on the gradients of an in-place operator: moved, and else as they came."""
    given = next((g for g in case.gradients or () if g is not None), None)
    for y, want in zip(case.results, expectation.results, strict=False):
        if y is None or want is None or given is None:
            continue
        if y.shape != want.value.shape:
            return True
        unchanged = y.numel() == given.numel() and torch.equal(y.reshape(-1), given.reshape(-1))
        if unchanged and not torch.equal(y, want.value.to(y.dtype)):
            return True
    return False


def _against(
    case: Case,
    recorded: Sequence[Tensor | None],
    reference: Reference,
    backward: bool,
    tolerance: Tolerance | None,
) -> Checked:
    direction: Direction = "backward" if backward else "forward"
    limit = formulas()[api(case.name)].results if reference.source == "formula" and not backward else None
    left = 0 if limit is None else max(0, len(recorded) - limit)
    recorded = recorded[: len(recorded) - left]
    if len(recorded) > len(reference.results):
        text = f"the dump holds {len(recorded)} results and this torch gives {len(reference.results)}"
        return Checked(direction, [Judgement("not checked", text)])
    judgements: list[Judgement] = []
    for i, found in enumerate(_settled(recorded, reference, tolerance)):
        y, want = recorded[i], reference.results[i]
        if y is None or (want is None and not backward):
            continue
        if want is None or found is None:
            if bool((y != 0).any()):
                judgements.append(Judgement("not checked", "torch gives no gradient here"))
            continue
        y, want = fitted(y, want)
        if backward and y.shape != want.value.shape:  # autograd lets no gradient of another shape through
            text = "it ran as several operators, and the gradients are those of one inside it"
            return Checked(direction, [Judgement("not checked", text)])
        found = recognised(case, i, y, want, found, backward) if tolerance is None else found
        found = found if backward else signed_zeros(case, y, want, found)
        if found.outcome in ("bug", "suspicious") and backward:
            found = at_borders(case, y, want, found)
        if found.outcome == "bug" and backward:
            found = tied(case, found)
        if found.outcome == "bug":
            cause = likely(case, i, y, found, backward)
            found = replace(found, reason=f"{found.reason}; {cause}") if cause else found
            found = found if y.shape != want.value.shape else replace(found, furthest=furthest(y, want.value))
        judgements.append(found)
    cast = str(reference.autocast).removeprefix("torch.")
    note = "" if reference.autocast is None else f"inputs taken as cast to {cast} by autocast"
    note = f"its other {left} results are not judged" if left else note
    return Checked(direction, judgements, reference.source, note, reference.expectation())


def _settled(recorded: Sequence[Tensor | None], reference: Reference, tolerance: Tolerance | None) -> list[Judgement | None]:
    """Judge each result, with only as much of a kernel's noise as it takes to call it right.

    A bound that leaves noise out is narrower: what is within it is right, and most results are.
    """
    if tolerance is None and reference.is_exactly(recorded):
        return [None if y is None else Judgement("exact", count=y.numel()) for y in recorded]
    found: list[Judgement | None] = [None] * len(recorded)
    more, narrowed = True, False
    reference.take_known()
    while True:
        brief = more and tolerance is None
        for i, (y, want) in enumerate(zip(recorded, reference.results, strict=False)):
            known = found[i]
            if y is not None and want is not None and not (known is not None and known.outcome in _SETTLED):
                found[i] = judge(*fitted(y, want), tolerance, brief=brief)
        if not brief or all(known is None or known.outcome in _SETTLED for known in found):
            return found
        doubtful = None if narrowed or not reference.can_narrow else _doubtful(recorded, reference)
        narrowed = True
        more = (doubtful is not None and reference.refine_at(doubtful, recorded)) or reference.refine()


_SETTLED = ("exact", "rounding")
_A_FEW = 0.25  # of the elements


def _real(y: Tensor) -> bool:
    return y.dtype in UNIT and not y.is_complex()


def _doubtful(recorded: Sequence[Tensor | None], reference: Reference) -> Tensor | None:
    """Return which elements lie beyond the bound that is known; None where these are many, or none."""
    found: Tensor | None = None
    for y, want in zip(recorded, reference.results, strict=False):
        if y is None or want is None or want.noise is None or not _real(y) or y.shape != want.value.shape:
            continue
        beyond = far(y, want.value, want.noise)
        if found is not None and found.shape != beyond.shape:
            return None
        found = beyond if found is None else found | beyond
    return found if found is not None and 0 < int(found.sum()) <= _A_FEW * found.numel() else None


def fitted(y: Tensor, want: Expected) -> tuple[Tensor, Expected]:
    """Bring both to one shape: a gradient may be seen before or after torch sums it to the shape of a broadcast argument.

    Some dumps hold a bool as bytes.
    """
    r = want.value
    if r.dtype == torch.bool and y.dtype == torch.uint8:
        return y.to(torch.bool), want
    if y.shape != r.shape and y.numel() == r.numel() and (_broadcasts(r.shape, y.shape) or _broadcasts(y.shape, r.shape)):
        return y.reshape(r.shape), want
    if y.shape == r.shape or not y.is_floating_point() or y.numel() == r.numel():
        return y, want
    if y.numel() > r.numel() and _broadcasts(r.shape, y.shape):
        return y.to(torch.float64).sum_to_size(r.shape).to(y.dtype), want
    if not _broadcasts(y.shape, r.shape) or y.dtype not in UNIT:
        return y, want
    each = UNIT[y.dtype] * r.abs() + (0.0 if want.noise is None else want.noise)
    length = (r.numel() / max(1, y.numel())) ** 0.5
    noise = each.square().sum_to_size(y.shape).sqrt() + min(SINGLE, UNIT[y.dtype]) * length * r.abs().sum_to_size(y.shape)
    return y, Expected(r.sum_to_size(y.shape), noise, source=want.source)


def _broadcasts(small: torch.Size, large: torch.Size) -> bool:
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small[::-1], large[::-1], strict=False))
