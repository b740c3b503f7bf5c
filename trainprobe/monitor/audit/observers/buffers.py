"""The buffers of the model before the first forward of a step and after its update."""

from __future__ import annotations

from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS, column
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.capture.values import checksum_of, mean_of
from trainprobe.monitor.audit.facts.updates import BufferStates
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.model_calls import ModelCalls


class Buffers(Observer):
    """Looks at steps that are fingerprinted."""

    needs = (ModelCalls,)
    essential = True

    def forget(self) -> None:
        """Forget the last step."""
        self._begun: dict[str, Value] = {}
        self._updated: dict[str, Value] = {}

    def first_forward(self) -> None:
        """Look before the model runs."""
        if self._audited.tape is not None and self._audited.fingerprints:
            self._begun = self._look(self._audited.tape)

    def stepped(self) -> None:
        """Look after the update."""
        if self._audited.tape is not None and self._audited.fingerprints:
            self._updated = self._look(self._audited.tape)

    def facts(self, step_data: StepData) -> BufferStates:
        """Return the fingerprints, the buffers that hold a NaN, and the counters of averaged batches."""
        last = (self._begun | self._updated).items()
        found = BufferStates(
            {name: checksum_of(step_data, v) for name, v in self._begun.items()},
            {name: checksum_of(step_data, v) for name, v in self._updated.items()},
            tuple(name for name, v in last if _has_nan(step_data, v)),
            {
                name: (mean_of(step_data, self._begun[name]), mean_of(step_data, v))
                for name, v in self._updated.items()
                if name.endswith("num_batches_tracked") and name in self._begun
            },
        )
        self.forget()
        return found

    def _look(self, tape: Tape) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, buffer in (pair for model in self._audited.models for pair in list(unwrapped(model))[-1].named_buffers()):
            found[name] = tape.value(buffer, STATS | CHECKSUM)
            tape.touched(buffer)  # later it is looked at again: a write through `.data` leaves no trace
        return found


def _has_nan(step_data: StepData, value: Value) -> bool:
    return value.row >= 0 and bool(column(step_data.partials[value.row : value.row + 1], "nan")[0] > 0)
