"""What a call should have given: its float64 result, and the noise of a correct kernel around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from trainprobe.op_check.autocast import autocast
from trainprobe.op_check.cases import Case, Tensor, mapped
from trainprobe.op_check.functions import api
from trainprobe.op_check.measure import Allowance, far, is_nearest
from trainprobe.op_check.noise import COARSE, UNIT, Noise
from trainprobe.op_check.references import formulas
from trainprobe.op_check.run import SINGLE, Run

EVALUATIONS = 8  # with noise, at most
_IEEE = frozenset(
    ("add", "sub", "rsub", "mul", "square", "div", "true_divide", "reciprocal", "sqrt")
)  # float64 defines their bits
_ENOUGH = 4  # of them, to know how far the sizes of results move as a whole


@dataclass(frozen=True, slots=True)
class Expected:
    """One result as it should be. value: float64, or whole numbers. given: its noise, None where nothing is rounded.

    gain: the largest ⟨m − r, r⟩ / ⟨r, r⟩ of the evaluations m with noise, where there were enough to tell. one_sided: how
    unevenly |m| lay above and below |r|, in standard deviations. source: "IEEE 754" where float64 arithmetic alone
    defines the bits, "formula", or "float64 kernel" of torch.
    """

    value: Tensor
    given: Allowance | Tensor | None
    gain: float = math.inf
    one_sided: float = math.inf
    source: str = "formula"

    @property
    def noise(self) -> Tensor | None:
        """How far a correct kernel may be off: float64 ≥ 0 for each element, None where nothing is rounded."""
        return self.given.tensor if isinstance(self.given, Allowance) else self.given


@dataclass(frozen=True, slots=True)
class Expectation:
    """All results of a call, flat. source: "formula", or "float64 kernel" of torch. autocast: inputs were rounded first."""

    results: Sequence[Expected | None]
    source: str
    autocast: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class EvaluationSteps:
    """How a kernel rounds. accumulate: u of what it calculates in; matrices: of the inputs of its products of matrices.

    walk: a sum's error is that of a random walk, which is smaller than what can be promised, for telling modes from bugs.
    """

    accumulate: float = SINGLE
    matrices: float = 0.0
    walk: bool = False


_HOW = (Run.known_rounding, Run.rounding_by_norms, Run.rounding_of_sums)


class Reference:
    """What a call should have given, with as much of a kernel's noise as was asked for.

    steps: how a kernel rounds, float32 by default. Raises NotChecked where there is no reference.
    """

    def __init__(self, case: Case, backward: bool = False, steps: EvaluationSteps | None = None) -> None:
        self._steps = steps or EvaluationSteps()
        self.autocast = autocast(case)
        self._run = Run(case, backward, self.autocast)
        recorded = case.results if backward else case.outputs
        self._unit = max((UNIT.get(t.dtype, 0.0) for t in recorded if t is not None), default=0.0)
        self.source, self._values = self._run.first()
        once = self.source == "formula" and self._run.rounded == 1
        self._left = 0 if not self._run.rounded else 1 if once else EVALUATIONS
        self._evaluated = 0
        self._moved = 0  # evaluations
        self._asked = 0  # ways to know the rounding without them
        self._gains = [0.0] * len(self._values)
        self._sides = [0.0] * len(self._values)

    @cached_property
    def _noises(self) -> list[Allowance | None]:
        return [None if r is None or not self._run.rounded else self._last_step(r) for r in self._values]

    def is_exactly(self, recorded: Sequence[Tensor | None]) -> bool:
        """Return whether all recorded results are the correctly rounded ones, bit by bit."""
        if len(recorded) > len(self._values):
            return False
        for y, r in zip(recorded, self._values, strict=False):
            if y is None or r is None or y.shape != r.shape or y.dtype not in UNIT or not r.is_floating_point():
                return False
            if y.dtype == torch.float64:  # the reference itself is rounded to it
                return False
            if y.is_complex() or not is_nearest(y, r):
                return False
        return True

    @property
    def can_narrow(self) -> bool:
        """Return whether the noise of some elements alone can be found."""
        known = formulas().get(api(self._run.case.name)) if self.source == "formula" else None
        return known is not None and known.pointwise and (self._run.backward or known.rounding is None) and self._left > 0

    @property
    def results(self) -> list[Expected | None]:
        """Return each result with the noise that is known: at first the rounding of the last step alone."""
        told = self._moved >= _ENOUGH or self._evaluated < self._left
        nothing = (math.inf, math.inf)
        found = zip(self._values, self._noises, self._gains, self._sides, strict=True)
        source = "IEEE 754" if api(self._run.case.name) in _IEEE else self.source
        return [
            None if r is None else Expected(r, n, *((gain, side) if told else nothing), source) for r, n, gain, side in found
        ]

    def refine(self) -> bool:
        """Evaluate the call once more with its steps moved; return False where that was done often enough before."""
        if self._evaluated == self._left:
            return False
        formula = self.source == "formula"
        if self._evaluated == 0 and not self._steps.walk and self._known(len(_HOW)):
            return True
        self._widen(self._run.once(self._noise(self._evaluated)))
        if not formula:
            self._widen(self._run.once(self._noise(self._evaluated + 80), True))
        self._evaluated += 1
        self._moved += 1
        return True

    def take_known(self) -> None:
        """Take in what is known of the rounding before anything is judged."""
        if self._left and not self._steps.walk:
            self._known(len(_HOW) - 1)

    def _known(self, most: int) -> bool:
        """Take in the rounding that is known without trying: of products first as norms give it, then the whole."""
        while self._asked < most:
            i, self._asked = self._asked, self._asked + 1
            known = _HOW[i](self._run, self._accumulate())
            if known is not None:
                for j, (r, n) in enumerate(zip(self._values, self._noises, strict=True)):
                    if r is not None and n is not None:
                        self._noises[j] = self._larger(n, self._last_step(r, *known[j]))
                self._evaluated = 0 if i == 1 else self._left
                return True
        return False

    def refine_at(self, places: Tensor, recorded: Sequence[Tensor | None]) -> bool:
        """Find as much noise of these elements alone as explains them; return False where they do not stand for themselves.

        places: bool, of the shape of each result. recorded: the results, to be explained.
        """
        case, backward = self._run.case, self._run.backward
        shape = places.shape
        tensors = [*case.tensors(), *(t for t in (*(case.gradients or ()), *self._values) if t is not None)]
        if self._evaluated or not self.can_narrow:
            return False
        if self.autocast is not None or any(t.shape != shape and t.numel() != 1 for t in tensors):
            return False
        index = places.reshape(-1).nonzero().squeeze(-1)

        def part(t: Tensor | None) -> Tensor | None:
            return t.reshape(-1)[index] if t is not None and t.shape == shape and places.ndim else t

        smaller = replace(
            case,
            args=mapped(tuple(case.args), part),
            kwargs=mapped(dict(case.kwargs), part),
            outputs=[part(t) for t in case.outputs],
            gradients=None if case.gradients is None else [part(t) for t in case.gradients],
            results=[part(t) for t in case.results],
        )
        alone = Reference(smaller, backward, self._steps)
        while alone.refine() and not all(alone.explains(part(y), j) for j, y in enumerate(recorded)):
            pass
        for noise, found in zip(self._noises, alone.results, strict=True):
            if noise is not None and found is not None and found.noise is not None:
                noise.tensor.put_(index, found.noise.reshape(-1))
        return True

    def explains(self, y: Tensor | None, index: int) -> bool:
        """Return whether the noise that is known explains all elements of a result."""
        r, noise = self._values[index], self._noises[index]
        return y is None or r is None or noise is None or not bool(far(y, r, noise.tensor).any())

    def _accumulate(self) -> float:
        return self._unit if self._unit == UNIT[torch.float64] else self._steps.accumulate

    def _last_step(self, r: Tensor, size: Tensor | None = None, factor: float = 0.0) -> Allowance:
        """Return the rounding of the last step of a kernel, and a noise of factor · size before it."""
        if not (r.is_floating_point() or r.is_complex()):
            return Allowance.of(r)
        if not (self.source == "formula" and r.ndim and not r.is_complex() and formulas()[api(self._run.case.name)].rows):
            return Allowance(r, self._accumulate(), size, factor)
        whole = torch.where(r == 0, 0.0, r.abs() + (r * r).sum(-1, True).sqrt_())
        noise = whole.mul_(self._accumulate()).nan_to_num_(0.0, 0.0, 0.0)
        return Allowance.of(noise if size is None else noise.add_(size.to(noise.dtype) * factor))

    @staticmethod
    def _larger(known: Allowance, found: Allowance) -> Allowance:
        """Return the larger of two. found: is at least the rounding of the last step."""
        if known.size is None:
            return found
        return Allowance.of(torch.maximum(known.tensor, found.tensor, out=found.tensor))

    def _noise(self, turn: int) -> Noise:
        unit, steps, accumulate = self._unit, self._steps, self._accumulate()
        kernel = self.source != "formula"
        noise = Noise(turn, accumulate, max(unit, accumulate), backward=self._run.backward, kernel=kernel)
        noise.matrices, noise.walk = steps.matrices, steps.walk
        if unit == UNIT[torch.float16]:
            noise.largest, noise.least = torch.finfo(torch.float16).max, torch.finfo(torch.float16).tiny
        return noise

    def _widen(self, moved: Sequence[Tensor | None]) -> None:
        """Take in how far each element moved."""
        for i, (r, m) in enumerate(zip(self._values, moved, strict=True)):
            known = self._noises[i]
            if r is None or m is None or known is None or not (r.is_floating_point() or r.is_complex()):
                continue
            distance = m - r
            self._gains[i] = max(self._gains[i], _gain(distance, r))
            if self._unit >= COARSE:
                self._sides[i] = max(self._sides[i], _one_sided(distance, r))
            distance = distance.abs_() if not distance.is_complex() else distance.abs()
            if not math.isfinite(float(distance.sum())):
                distance = torch.where((r == m) | (r.isnan() & m.isnan()), 0.0, distance)
                distance = distance.nan_to_num_(math.inf, math.inf)
            self._noises[i] = Allowance.of(torch.maximum(known.tensor, distance, out=distance))

    def expectation(self) -> Expectation:
        """Return what is known now."""
        return Expectation(self.results, self.source, self.autocast)


def _gain(error: Tensor, r: Tensor) -> float:
    """Return |⟨error, r⟩| / ⟨r, r⟩, infinity where that is no number."""
    if r.is_complex():
        return math.inf
    flat = r.reshape(-1)
    square = float(torch.dot(flat, flat))
    gain = abs(float(torch.dot(error.reshape(-1), flat))) / square if square else math.inf
    return gain if math.isfinite(gain) else math.inf


def _one_sided(error: Tensor, r: Tensor) -> float:
    """Return how many more elements grew than shrank, or the other way round, in standard deviations."""
    if r.is_complex():
        return math.inf
    grown = torch.where(r < 0, -error, error)
    up, down = int((grown > 0).sum()), int((grown < 0).sum())
    return abs(up - down) / math.sqrt(up + down) if up + down else 0.0


def expect(case: Case, *, backward: bool = False, steps: EvaluationSteps | None = None) -> Expectation:
    """Return what the call's outputs, or with `backward` what its gradients should be, with all of the noise.

    steps: how a kernel rounds, float32 by default. Raises NotChecked where there is no reference.
    """
    reference = Reference(case, backward, steps)
    while reference.refine():
        pass
    return reference.expectation()
