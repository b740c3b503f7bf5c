"""The results of one judged call, measured for the standards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainprobe.op_check.cases import Case, NotChecked, Tensor, flat
from trainprobe.op_check.check import Checked, fitted
from trainprobe.op_check.execution import operator_of, run_here, run_on
from trainprobe.op_check.judge import Judgement
from trainprobe.op_check.standards.metrics import Metrics, measure
from trainprobe.op_check.standards.verdicts import ERROR, PASS, SKIP, StandardVerdict, by_standard


@dataclass(slots=True)
class Output:
    """One result. judgement: ours of the whole call. metrics: None where no reference says what the result should be.

    second: metrics of a second result of the same inputs. given: dtypes of the call's tensors.
    """

    number: int
    dtype: torch.dtype
    bench: torch.dtype
    shape: tuple[int, ...]
    judgement: Judgement
    metrics: Metrics | None = None
    second: Metrics | None = None

    @property
    def elements(self) -> int:
        """Return how many elements it has."""
        return torch.Size(self.shape).numel()

    def verdict(self, standard: str, name: str) -> StandardVerdict:
        """Judge it by a standard. name: of its operator. What has no reference is judged by its properties alone."""
        if self.metrics is not None and self.metrics.unequal is not None and self.elements:
            return by_standard(standard, name, self.dtype, self.metrics, self.second)
        return without_metrics(self.judgement, standard)


def without_metrics(judgement: Judgement, standard: str = "") -> StandardVerdict:
    """Return the status of what has properties and no reference: random operators, memory that nobody wrote."""
    status = {"bug": ERROR, "suspicious": ERROR, "not checked": SKIP}.get(judgement.outcome, PASS)
    return StandardVerdict(
        status, f"{judgement.outcome}: {judgement.reason}" if judgement.reason else judgement.outcome, standard
    )


def outputs(case: Case, backward: bool, checked: Checked) -> list[Output]:
    """Measure all results of a call that was just judged."""
    return _measured(case, backward, checked, False)


def outputs_and_second(case: Case, backward: bool, checked: Checked) -> list[Output]:
    """Measure all results of a call, and those of this machine's operator in the recorded formats beside them."""
    return _measured(case, backward, checked, True)


def _measured(case: Case, backward: bool, checked: Checked, second: bool) -> list[Output]:
    recorded = case.results if backward else [*case.outputs, *flat(dict(case.written))]
    wanted = checked.expectation.results if checked.expectation is not None else []
    here = _here(case, backward) if second and any(w is not None for w in wanted) else []
    found: list[Output] = []
    for i, y in enumerate(recorded):
        if y is None:
            continue
        want = wanted[i] if i < len(wanted) else None
        bench = y.dtype if want is None else want.value.dtype
        output = Output(i, y.dtype, bench, tuple(y.shape), checked.worst)
        found.append(output)
        if want is None:
            output.metrics = _by_properties(y, checked.worst)
            continue
        fit, expected = fitted(y, want)
        if fit.shape == expected.value.shape and not fit.is_complex():
            output.metrics = measure(fit, expected.value)
            other = here[i] if i < len(here) else None
            if other is not None and other.shape == fit.shape and other.dtype == fit.dtype:
                output.second = measure(other, expected.value)
    return found


def _by_properties(y: Tensor, judgement: Judgement) -> Metrics | None:
    """Return what is known of whole numbers that no reference gives: with all properties they are as good as equal."""
    if y.is_floating_point() or y.is_complex() or judgement.outcome == "not checked":
        return None
    wrong = judgement.outcome in ("bug", "suspicious")
    return Metrics(unequal=judgement.share if wrong and judgement.share else None if wrong else 0.0)


def _here(case: Case, backward: bool) -> Sequence[Tensor | None]:
    """Return what this machine's operator gives; nothing where it cannot be run."""
    copied = replace(case)
    try:
        if not (backward and case.of_inputs):
            ran = run_here(copied, backward)
            return ran.results if backward else [*ran.outputs]
        return list(run_on(copied, True, operator_of(case), "cpu")[2])
    except (NotChecked, RuntimeError, TypeError, ValueError, IndexError):
        return []
