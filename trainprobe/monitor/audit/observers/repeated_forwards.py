"""Forwards that ran again within a backward pass, compared with the first ones of the same module: what recomputation gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS, column
from trainprobe.monitor.audit.capture.values import checksum_of, norm_of
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.recomputed_forward import ModuleOutput, Repeat, Repeats


class RepeatedForwards(Observer):
    """Learns in one step which modules run again, and compares their outputs in those that follow."""

    needs = (ModelCalls,)
    essential = True
    only_when_due = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._again: set[int] = set()  # ids of modules that were seen to run again in a backward pass

    def begin(self) -> None:
        """Forget the last step."""
        self._repeats: list[tuple[int, list[Value]]] = []  # id of a module and the outputs of its forward that ran again
        self._firsts: dict[int, list[list[Value]]] = {}
        self._looked_at = frozenset(self._again)  # of these every forward of the step is seen, in whatever order they run

    def module_returned(self, module: Any, result: Any) -> None:
        """Take the outputs of a forward in a backward pass, and from then on those of that module's first forwards."""
        tape = self._audited.tape
        if tape is None:
            return
        key, within = id(module), torch._C._current_graph_task_id() != -1
        if within:
            self._again.add(key)
        if key not in self._looked_at or (within and key not in self._firsts):
            return
        with DisableTorchFunction():
            values = [tape.value(t.detach(), STATS | CHECKSUM) for t in tensors_of(result) if t.is_floating_point()]
        if within:
            self._repeats.append((key, values))
        else:
            self._firsts.setdefault(key, []).append(values)

    def facts(self, step_data: StepData) -> Repeats:
        """Return each forward that ran again, and the forwards of its module in this step."""
        names, order = self._audited.of(ModelCalls).names, {key: i for i, key in enumerate(self._firsts)}
        found = (
            Repeat(
                names.get(key, ""),
                order[key],
                _outputs(step_data, again),
                tuple(_outputs(step_data, first) for first in self._firsts[key]),
            )
            for key, again in self._repeats
        )
        return Repeats(tuple(found))


def _outputs(step_data: StepData, values: Sequence[Value]) -> tuple[ModuleOutput, ...]:
    out: list[ModuleOutput] = []
    for value in (value for value in values if value.row >= 0):
        row = step_data.partials[value.row : value.row + 1]
        total, count = float(column(row, "sum")[0]), float(column(row, "count")[0])
        out.append(ModuleOutput(checksum_of(step_data, value), norm_of(step_data, value), total, count, value.dtype))
    return tuple(out)
