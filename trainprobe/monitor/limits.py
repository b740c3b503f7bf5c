"""How far a series may go, for the rules that know one limit for the loss and one for norms."""

from __future__ import annotations

from trainprobe.monitor.frames import F64, I64, Frame, Track
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.scalar_names import role_of


def limits(frame: Frame, memory: Memory, places: I64, rows: I64, *, loss: float, norms: float) -> F64:
    """Return the limit of each series, [n]: `loss`, `norms`, or 0 for a scalar that is neither the loss nor a gradient norm."""

    def limit(track: Track) -> float:
        role = role_of(track.spot.name) if track.spot.kind == "scalar" else "gradient norm"
        return {"loss": loss, "gradient norm": norms}.get(role or "", 0.0)

    return memory.learned("limit", frame, places, rows, limit)
