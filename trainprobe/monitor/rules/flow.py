"""Gradients that explode or vanish over depth: the slope of the log gradient norm over the layer number.

Parameters whose names differ only in one number (`layers.3.mlp.fc1.weight`) form a family. Over a family of at least
`layers` layers, least squares gives ln‖g_l‖ = a + b·l. The flow is broken when the fitted change over the whole depth,
exp(|b|·(L-1)), exceeds `limit` and the line explains the data (r² > 0.7), at `patience` collected steps in a row.

Sources: Hochreiter (1991), Bengio, Simard and Frasconi (1994); the log-linear fit as the Lyapunov exponent of depth
(Poole et al., 2016).
"""

from __future__ import annotations

import re

import numpy as np

from trainprobe.engine.records import Finding
from trainprobe.monitor.frames import F64, I64, Frame, Selection
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import RuleOptions

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


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Fit each family of layers and find the ones whose gradient explodes or vanishes."""
    places, _ = memory.watch(frame, [Selection(("parameter",), ("grad",), ("norm",), options.names)])
    families = _families(frame, memory, places)
    deep = {name: family for name, family in families.items() if len(family[1]) >= options.layers}
    fits = {name: _fit(frame.values[where], layers) for name, (where, layers) in deep.items()}
    if not fits:
        return []
    rows = np.array([memory.row(name) for name in fits])
    broken = np.array([abs(slope) * depth > np.log(options.limit) and fit > 0.7 for slope, depth, fit in fits.values()])
    ripe = memory.newly("flow", rows, memory.lasting("broken", rows, broken) >= options.patience)
    if not ripe.any():
        return []
    found = [name for name, is_ripe in zip(fits, ripe, strict=True) if is_ripe]
    worst = max(found, key=lambda name: abs(fits[name][0]) * fits[name][1])
    return [_finding(frame, options, worst, fits[worst], int(families[worst][0][0]), len(found))]


def _families(frame: Frame, memory: Memory, places: I64) -> dict[str, tuple[I64, I64]]:
    """Return family → (places in the frame, layer numbers); remembered as long as steps look alike."""
    key = (id(frame.tracks), places.tobytes(), frame.at[places].tobytes())
    if memory.scratch.get("key") == key:
        return memory.scratch["families"]
    groups: dict[str, list[tuple[int, int]]] = {}
    for place in places.tolist():
        name = frame.tracks.tracks[frame.at[place]].spot.name
        if match := _NUMBER.search(name):
            groups.setdefault(f"{name[: match.start()]}*{name[match.end() :]}", []).append((int(match[1]), place))
    families = {
        name: (np.array([p for _, p in sorted(members)]), np.array([layer for layer, _ in sorted(members)]))
        for name, members in groups.items()
    }
    memory.scratch["key"], memory.scratch["families"] = key, families
    return families


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
    says = "vanishes towards the first layer" if slope > 0 else "explodes towards the first layer"
    others = f"; {how_many - 1} other families too" if how_many > 1 else ""
    return Finding(
        rule="flow",
        severity=options.severity,
        message=f"the gradient of {family} {says}: a factor {np.exp(abs(slope)):.3g} a layer, {change:.3g} over "
        f"{depth + 1:.0f} layers (r² {quality:.2f}){others}",
        step=frame.step,
        place=frame.place,
        site=frame.tracks.tracks[frame.at[place]].spot.site(),
        measured=change,
        expected=options.limit,
        next="check normalisation, residual branches and initial scale of these layers",
    )
