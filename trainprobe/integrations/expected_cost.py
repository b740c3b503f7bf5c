"""What a watched step will cost, in figures: how much the probe will read, and how long that takes here, timed at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainprobe.engine.stats.partials import CHECKSUM, STATS

if TYPE_CHECKING:
    from trainprobe.watching import Probe

_TIMED_BYTES = 64 << 20  # parameters are read for the timing until this much
_STATE = 2  # tensors that an optimizer such as Adam keeps for a parameter


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kind of step costs. bytes: read by the probe. seconds: the time that this takes here, about."""

    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"about {1e3 * self.seconds:.2g} ms ({_size(self.bytes)} read)"


def expected(probe: Probe) -> tuple[Cost, Cost]:
    """Return what a monitored and what an audited step cost on this rank, activations left out.

    Reads parameters once or twice, as a watched step would, and times that; no number is drawn and nothing is changed.
    """
    held = list(_held(probe))
    size = sum(nbytes for _, nbytes in held)
    if not size:
        return Cost(0, 0.0), Cost(0, 0.0)
    seconds = _timed(probe, held, STATS)
    watched, audited = _passes(probe)
    heavy = _timed(probe, held, STATS | CHECKSUM) if audited else 0.0
    return Cost(int(size * watched), seconds * watched), Cost(int(size * audited), heavy * audited)


def _held(probe: Probe) -> Iterator[tuple[Any, int]]:
    """Yield what this process holds of each parameter, and its bytes; of a shard, the shard alone."""
    from trainprobe.engine.capture.parameter_states import ParameterStateTap

    states = probe.taps.get("states", ParameterStateTap)
    for p in states.parameters if states is not None else ():
        tensor = getattr(p, "ds_tensor", getattr(p, "_local_tensor", p))
        device = str(getattr(tensor, "device", "meta"))
        if not device.startswith("meta"):
            yield tensor.detach(), int(tensor.numel()) * int(tensor.element_size())


def _passes(probe: Probe) -> tuple[float, float]:
    """Return how many times the bytes of all parameters are read in a monitored and in an audited step."""
    monitor, audit = probe.monitor_plan, probe.audit
    watched = 0.0
    if monitor is not None:
        gradients = monitor.gradients
        watched += 2 * monitor.parameters.on / monitor.parameters.every
        kinds = gradients.reduced + gradients.unclipped + gradients.unreduced
        watched += gradients.on * kinds / gradients.every
        watched += 2 * _STATE * monitor.optimizer_state.on / monitor.optimizer_state.every
        watched += 3 * monitor.update.on / monitor.update.every
    return watched, float(2 + 2 + 2 * _STATE) if audit is not None else 0.0


def _timed(probe: Probe, held: list[tuple[Any, int]], flags: int) -> float:
    """Return the seconds that one pass over all parameters takes, from one over as many as fit the limit."""
    chosen, nbytes = list[Any](), 0
    for tensor, size in held:
        if not chosen or nbytes + size <= _TIMED_BYTES:
            chosen.append(tensor)
            nbytes += size
    best = min(_one_pass(probe, chosen, flags, time.perf_counter) for _ in range(2))
    return best * sum(size for _, size in held) / max(nbytes, 1)


def _one_pass(probe: Probe, tensors: list[Any], flags: int, now: Callable[[], float]) -> float:
    began = now()
    tape = probe.new_tape(-1)
    for tensor in tensors:
        tape.value(tensor, flags)
    tape.drain(-1, probe.place, framework="", level="off", task="statistics")
    return now() - began


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} bytes"
