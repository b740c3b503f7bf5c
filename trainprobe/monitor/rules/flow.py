"""Gradients that explode or vanish over depth: the slope of the log gradient norm over the layer number.

Parameters whose names differ only in one number (`layers.3.mlp.fc1.weight`) form a family. Over a family of at least
`layers` layers, least squares gives ln‖g_l‖ = a + b·l. The flow is broken when the fitted change over the whole depth,
exp(|b|·(L-1)), exceeds `limit` and the line explains the data (r² > 0.7), at `patience` collected steps in a row.

Sources: Hochreiter (1991), Bengio, Simard and Frasconi (1994); the log-linear fit as the Lyapunov exponent of depth
(Poole et al., 2016).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import F64, I64, Frame
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import RuleOptions, norms_of_gradients

Fit = tuple[float, float, float]  # slope, depth, r²
_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")


class Options(RuleOptions):
    """Settings of the rule `flow`."""

    limit: float = 1000.0
    """By what factor the gradient norm may change from the first layer to the last."""
    layers: int = 4
    """How many layers a family must have."""
    patience: int = 10
    """At how many collected steps in a row it must have been broken."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return self.patience


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Fit each family of layers and find the ones whose gradient explodes or vanishes."""
    places, _ = memory.watch(frame, norms_of_gradients(options.names))
    families = memory.worked_out(f"families {options.layers}", places, lambda: _families(frame, memory, places, options.layers))
    if families is None:
        return []
    limit = np.log(options.limit)
    fits: dict[int, Fit] = {}
    for i in np.flatnonzero(_changes(frame.values[families.places], families) > limit * 0.999).tolist():
        fits[i] = _fit(frame.values[families.members[i][0]], families.members[i][1])
    broken = np.zeros(len(families.names), dtype=bool)
    broken[[i for i, (slope, depth, fit) in fits.items() if abs(slope) * depth > limit and fit > 0.7]] = True
    ripe = memory.newly("flow", families.rows, memory.lasting("broken", families.rows, broken) >= options.patience)
    if not ripe.any():
        return []
    found = np.flatnonzero(ripe).tolist()
    worst = max(found, key=lambda i: abs(fits[i][0]) * fits[i][1])
    return [_finding(frame, options, families.names[worst], fits[worst], int(families.members[worst][0][0]), len(found))]


@dataclass(frozen=True, slots=True, eq=False)
class Families:
    """names, rows: of each family, and its row in the memory. members: (places in the frame, layer numbers) of each.

    places: those of all families, one after the other; begins: where each begins. weights: see `_changes`.
    """

    names: list[str]
    rows: I64
    members: list[tuple[I64, I64]]
    places: I64
    begins: I64
    weights: F64


def _changes(norms: F64, families: Families) -> F64:
    """Return |b|·(L-1) for each family, +inf where not all gradients are finite and not zero.

    b·(L-1) is the sum over the family of y = ln‖g‖ times the weights (x - mean x)·(L-1) / Σ(x - mean x)².
    """
    with np.errstate(all="ignore"):
        change = np.abs(np.add.reduceat(np.log(norms) * families.weights, families.begins))
    return np.where(np.isfinite(change), change, np.inf)


def _families(frame: Frame, memory: Memory, places: I64, least: int) -> Families | None:
    """Join the gradients at `places` to families of at least so many layers, or return None where there is none."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for place in places.tolist():
        name = frame.table.series[frame.at[place]].address.name
        if match := _NUMBER.search(name):
            groups.setdefault(f"{name[: match.start()]}*{name[match.end() :]}", []).append((int(match[1]), place))
    groups = {name: sorted(members) for name, members in groups.items() if len(members) >= max(least, 1)}
    if not groups:
        return None
    members = [(np.array([p for _, p in g]), np.array([layer for layer, _ in g])) for g in groups.values()]
    sizes = np.array([len(layers) for _, layers in members])
    with np.errstate(all="ignore"):  # one layer has no slope: its weight is NaN
        weights = np.concatenate([(x - x.mean()) * np.ptp(x) / np.square(x - x.mean()).sum() for _, x in members])
    rows = np.array([memory.row(name) for name in groups])
    begins = np.cumsum(sizes) - sizes
    return Families(list(groups), rows, members, np.concatenate([p for p, _ in members]), begins, weights)


def _fit(norms: F64, layers: I64) -> Fit:
    """Return (slope of the log norm, depth, r²) of the layers with a finite gradient that is not zero."""
    usable = np.isfinite(norms) & (norms > 0)
    if usable.sum() < 3:
        return 0.0, 0.0, 0.0
    x, y = layers[usable].astype(np.float64), np.log(norms[usable])
    x0, y0 = x - x.mean(), y - y.mean()
    if not (x0 @ x0) > 0 or not (y0 @ y0) > 0:
        return 0.0, 0.0, 0.0
    slope = float(x0 @ y0 / (x0 @ x0))
    return slope, float(x.max() - x.min()), float(slope * slope * (x0 @ x0) / (y0 @ y0))


def _finding(frame: Frame, options: Options, family: str, fit: Fit, place: int, how_many: int) -> Finding:
    slope, depth, quality = fit
    change = float(np.exp(abs(slope) * depth))
    direction = "vanishes towards the first layer" if slope > 0 else "explodes towards the first layer"
    others = f"; {how_many - 1} other families too" if how_many > 1 else ""
    return options.found(
        frame,
        f"the gradient of {family} {direction}: a factor {np.exp(abs(slope)):.3g} a layer, {change:.3g} over "
        f"{depth + 1:.0f} layers (r² {quality:.2f}){others}",
        frame.table.series[frame.at[place]].address.site(),
        measured=change,
        expected=options.limit,
        next="check normalisation, residual branches and initial scale of these layers",
    )
