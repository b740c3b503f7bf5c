"""A layer that passes nothing on: its output, or the gradient of a parameter, is zero.

An output is dead when its share of exact zeros is at least `share`, the gradient of a parameter when its norm is exactly
zero, at `patience` collected steps in a row. Where no share of zeros is known, a norm of exactly zero decides.

Where a rank holds a shard of a parameter, its part of the gradient may be zero in a healthy training: the rows of an embedding
whose tokens do not occur, an expert that gets none. So a shard that is its module's only parameter is dead only where all
parameters of the module around are.

Source: dying rectifiers as described by Lu et al. (2019), "Dying ReLU and initialization".
"""

from __future__ import annotations

from functools import cache

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.frames import F64, I64, Bools, Frame, Selection, Series
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import Patterns, RuleOptions, names_at


class Options(RuleOptions):
    """Settings of the rule `dead`."""

    share: float = 0.999
    """The share of exact zeros in an output from which it counts as dead."""
    patience: int = 20
    """At how many collected steps in a row it must have been dead."""

    def needs(self) -> int:
        """Return how many steps must be collected until the rule can find something."""
        return self.patience


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Find outputs and gradients that have been zero for too long."""
    places, rows = memory.watch(frame, _chosen(options.names))
    if not places.size:
        return []
    is_share = memory.worked_out("share", places, lambda: memory.learned("share", frame, places, rows, _is_share) == 1)
    values = frame.values[places]
    dead = np.where(is_share, values >= options.share, values == 0)
    dead &= ~_with_a_live_sibling(frame, places, dead & ~is_share, values)
    ripe = memory.newly("dead", rows, memory.lasting("zero", rows, dead) >= options.patience)
    if not ripe.any():
        return []
    addresses = list(dict.fromkeys(frame.table.series[t].address for t in frame.at[places[ripe]].tolist()))
    first = addresses[0]
    gradients = [frame.table.series[t].address for t in frame.at[places].tolist()]
    of = len({address for address in gradients if address.kind == "parameter"})
    who = "the gradient of" if first.kind == "parameter" else "the output of"
    what = f"{who} {first.name} has"
    others = f", and {len(addresses) - 1} more" if len(addresses) > 1 else ""
    hint = "look at what feeds it: a dead activation, a mask, a detached tensor, or a branch that is never taken"
    if 1 < of == sum(address.kind == "parameter" for address in addresses):
        what, others = f"the gradients of all {of} parameters have", ""
        hint = "look at the loss: targets that are all ignored, a mask that hides everything, a factor of 0"
    return [
        options.found(
            frame,
            f"{what} been zero at {options.patience} collected steps in a row{others}",
            first.site(),
            measured=float(values[ripe][0]),
            expected="less than all zeros",
            names=names_at(frame, places[ripe]),
            next=hint,
        )
    ]


def _with_a_live_sibling(frame: Frame, places: I64, zero: Bools, values: F64) -> Bools:
    """Tell which gradients are zero while another parameter of their module has one: gradient does arrive there.

    That of the last bias of a Wasserstein critic is, as what it adds to both of its means cancels. Where a shard is the only
    parameter of its module, the others are those of the module around.
    """
    out = np.zeros(zero.size, dtype=bool)
    if not zero.any():
        return out
    table, numbers = frame.table, frame.table.addresses_of(frame.at[places]).tolist()
    names = [address.name if (address := table.addresses[n]).kind == "parameter" else "" for n in numbers]
    modules = [name.rpartition(".")[0] for name in names]
    alive = {module for module, name, value in zip(modules, names, values.tolist(), strict=True) if name and value > 0}
    around = {holder for module in alive for holder in _and_holders(module)}
    for i in np.flatnonzero(zero).tolist():
        alone = table.shard[numbers[i]] and modules.count(modules[i]) == 1
        out[i] = bool(modules[i]) and (modules[i].rpartition(".")[0] in around if alone else modules[i] in alive)
    return out


def _and_holders(module: str) -> list[str]:
    """Return the name of a module and those of all modules that hold it; the model's own is empty."""
    return [module, *(module[:at] for at, letter in enumerate(module) if letter == "."), ""]


def _is_share(series: Series) -> bool:
    """Tell whether a series is a share of zeros; otherwise it is a norm."""
    return series.statistic == "zero_share"


@cache
def _chosen(names: Patterns) -> tuple[Selection, ...]:
    return (
        Selection(("module",), ("output",), ("zero_share", "norm"), names),
        Selection(("parameter",), ("grad",), ("norm",), names),
    )
