"""The spectral norm and the stable rank of weights, by power iteration.

    spectral norm   σ = max ‖Wv‖ over ‖v‖ = 1
    stable rank     ‖W‖_F² / σ²  (Rudelson and Vershynin, 2007): between 1 and the rank

A tensor of more than two dimensions is taken as a matrix of its first dimension by all others, as torch's spectral norm
does. An iteration is u = Wv/‖Wv‖, v = Wᵀu/‖Wᵀu‖. It begins at a fixed vector, 24 iterations long, and at later collected
steps goes on from the vector where it ended, as weights move little between steps; σ is approached from below. After k
iterations from the fixed start its relative error is about ln(n) / 2k at worst (Kuczyński and Woźniakowski, 1992), far less
where the largest singular value stands apart. Works in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainprobe.engine.capture.features.feature import QuietFeature, Surroundings, whole
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.tape import Tape

FIRST = 24


class WeightSpectra(QuietFeature):
    """See the module text. iterations: how many at each later step."""

    def __init__(
        self,
        around: Surroundings,
        *,
        every: int = 1,
        iterations: int = 4,
    ) -> None:
        super().__init__(around, every=every)
        self._parameters = around.parameters
        self._iterations = iterations
        self._ends: dict[str, Tensor] = {}

    def begin(self, tape: Tape, models: Sequence[Any]) -> None:
        """Look at the weights as they are when the step begins."""
        super().begin(tape, models)
        names = self._parameters()
        for p in parameters_in(models):
            name = names.get(id(p))
            if name is None or not self._chosen(name):
                continue
            if not whole(p):
                self.notes[_UNSEEN] = None
            elif p.dim() >= 2 and p.is_floating_point():
                start = self._ends.get(name)
                sigma, rank, self._ends[name] = spectrum(p, start, FIRST if start is None else self._iterations)
                tape.feature(name, "spectral_norm", sigma)
                tape.feature(name, "stable_rank", rank)


_UNSEEN = (
    "weight features leave out parameters that are not whole on this process (sharded by FSDP or ZeRO-3, or without data): "
    "gather them, or run one step unsharded, to see them"
)


def spectrum(weight: Tensor, start: Tensor | None, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (spectral norm, stable rank, vector where the iteration ended [columns]); of a zero matrix (0, 0, …).

    start: a unit vector [columns], or None for the fixed one.
    """
    w = weight.detach().flatten(1)
    w = w if w.dtype == torch.float64 else w.float()
    v = fixed_vector(w.shape[1], w.dtype, w.device) if start is None or start.shape[0] != w.shape[1] else start.to(w)
    tiny, turned, length = torch.finfo(w.dtype).tiny, w.T, torch.linalg.vector_norm
    sigma = v.new_zeros(())
    for _ in range(iterations):
        u = torch.mv(w, v)
        u.div_(length(u).clamp_min_(tiny))
        v = torch.mv(turned, u)
        sigma = length(v)
        v.div_(sigma.clamp_min(tiny))
    square = w.square().sum()
    return sigma, torch.where(square > 0, square / sigma.square().clamp_min(tiny), 0.0), v


def fixed_vector(length: int, dtype: Any, device: Any) -> Tensor:
    """Return the unit vector from which every first iteration begins: x_i = frac(i² · φ) - 1/2, φ the golden ratio less 1."""
    i = torch.arange(1, length + 1, dtype=torch.float64)
    x = (i * i * 0.6180339887498949) % 1.0 - 0.5
    return (x / x.norm()).to(dtype).to(device, non_blocking=True)
