"""Calls the sinks of a writer: one that fails loses the step at which it failed, and is tried again at the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.dumps.tensor_files import SavedTensor
from trainprobe.engine.storage.sinks import Sink
from trainprobe.engine.storage.step_counts import StepCounts

BATCH_WINDOW = 0.4  # seconds
BATCH_ROWS = 1 << 14  # where more rows than that are gathered, they are written at once


class Job(NamedTuple):
    """A piece of data on its way to the sinks."""

    verb: str  # of the sink
    arguments: tuple[Any, ...]
    bytes: int  # that it holds
    rows: int
    step: int
    names: Sequence[str] = ()  # of the sinks that take the step
    at: float = 0.0  # when it was handed over


@dataclass(slots=True)
class _Record:
    """What became of the steps of one sink. fault: the last one. told: whether its first failure was. lost: the step that it
    lost last. gathered: steps that it was given and did not write yet.
    """

    fault: Exception | None = None
    told: bool = False
    lost: int = -1
    gathered: list[int] = field(default_factory=list[int])


class SinkCalls:
    """Calls the sinks of a writer, on its thread, and keeps which steps each was given and lost.

    sinks: name → sink. counts: of the steps that each sink was given and lost. tell: receives severity, message and step of
    what there is to say. keep: receives the findings of the sinks themselves. due: when gathered steps are to be written.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        counts: StepCounts,
        tell: Callable[[Any, str, int | None], None],
        keep: Callable[[Finding], None],
    ) -> None:
        self.sinks = dict(sinks)
        self.counts = counts
        self._tell, self._keep = tell, keep
        self._writing, self._choosing = self._that_have("write"), self._that_have("takes")
        self.gathering, self._warning_sinks = self._that_have("flush"), self._that_have("warnings_made")
        self._tensors, self._chunks = self._that_have("tensor"), self._that_have("chunk")
        self._told = {"findings": self._that_have("findings"), "counts": self._that_have("counts")}
        self.takes_tensors = bool(self._tensors)
        self._records = {name: _Record() for name in sinks}
        self._gathered_rows = 0
        self.due: float | None = None

    def that_take(self, step_data: StepData) -> list[str]:
        """Return the names of the sinks that write a step."""
        return [name for name in self._writing if name not in self._choosing or self._choosing[name].takes(step_data)]

    def are_due(self) -> bool:
        """Tell whether gathered steps are to be written now."""
        return self.due is not None and (time.monotonic() >= self.due or self._gathered_rows >= BATCH_ROWS)

    def faults(self) -> Iterator[tuple[str, Exception]]:
        """Yield the sinks that failed at last, with the fault."""
        yield from ((name, record.fault) for name, record in self._records.items() if record.fault is not None)

    def hand_findings(self, findings: Sequence[Finding]) -> None:
        """Give findings to the sinks that keep them."""
        for name, sink in self._told["findings"].items():
            self._guarded(name, sink.findings, -1, findings)

    def close(self) -> None:
        """Write what is gathered, say which steps were lost, and close the sinks."""
        self.flush()
        self._count_what_waits()
        self._summarise()
        for name, sink in self.sinks.items():
            self._guarded(name, sink.close, -1)
            self._collect(name)
        self.counts.end()

    def carry_out(self, job: Job) -> None:
        """Give the sinks what they are to do."""
        if job.verb == "tensor":
            self._store(*job.arguments)
        elif job.verb == "chunk":
            self._store_chunk(*job.arguments)
        elif job.verb == "write":
            self._write(job)
        elif job.verb == "flush":
            self.flush()
        else:
            for name, sink in self._told[job.verb].items():
                self._guarded(name, getattr(sink, job.verb), job.step, *job.arguments)
        for name in self._warning_sinks:
            self._collect(name)

    def _write(self, job: Job) -> None:
        for name in job.names:
            self._guarded(name, self._writing[name].write, job.step, *job.arguments)
            record = self._records[name]
            if record.lost == job.step:
                record.lost = -1  # a run that goes back has a step of this number again
                self.lose([name], job.step)
            elif name in self.gathering:
                record.gathered.append(job.step)
                self.due = self.due or job.at + BATCH_WINDOW
        self._gathered_rows += job.rows

    def flush(self) -> None:
        """Have the steps written that some sinks gathered. One that fails keeps them and is asked again."""
        self._gathered_rows, self.due = 0, None
        for name, sink in self.gathering.items():
            record = self._records[name]
            fault, record.fault = record.fault, None
            self._guarded(name, sink.flush, -1)
            if record.fault is None:
                record.gathered.clear()
                record.fault = fault
            else:
                self.due = time.monotonic() + BATCH_WINDOW
        attempt(self.counts.look_after, otherwise=fault_text)

    def _store(self, step: int, key: str, data: Any) -> None:
        more = False
        saved: SavedTensor | None = None
        for name, sink in self._tensors.items():
            if saved is None:
                saved = self._guarded(name, _on_host, step, key, data)
            more |= saved is None or self._guarded(name, sink.tensor, step, step, saved) is not False
        self.takes_tensors = more

    def _store_chunk(self, step: int, chunk: Any) -> None:
        more = False
        for name, sink in self._chunks.items():
            more |= self._guarded(name, sink.chunk, step, step, chunk) is not False
        for name, sink in self._tensors.items():
            for saved in SavedTensor.all_of(chunk) if name not in self._chunks else ():
                more |= self._guarded(name, sink.tensor, step, step, saved) is not False
        self.takes_tensors = more

    def _guarded(self, name: str, call: Callable[..., Any], step: int, *arguments: Any) -> Any:
        """Call a sink for a step, -1 for none. Return None where it fails, or has failed at that step before."""
        record = self._records[name]
        if 0 <= step == record.lost:
            return None

        def failed(fault: Exception) -> None:
            record.fault = fault
            record.lost = step if step >= 0 else record.lost
            if not record.told:
                record.told = True
                self._tell_failure(name, step)

        return attempt(call, *arguments, otherwise=failed)

    def _tell_failure(self, name: str, step: int) -> None:
        when, then = (f" at step {step}", "that step is lost to it, and ") if step >= 0 else ("", "")
        message = f"the writer {name!r} failed{when}: {self._why(name)}; {then}it is tried again; the training goes on"
        self._tell("error", message, step if step >= 0 else None)

    def lose(self, names: Iterable[str], step: int) -> None:
        """Count a step that is lost to sinks."""
        for name in names:
            if name in self.counts.sinks:
                self.counts.sinks[name].lose(step, step)
        self.counts.keep()

    def _count_what_waits(self) -> None:
        """Count as lost what a sink gathered and could not write to the end."""
        for name, record in self._records.items():
            for step in record.gathered:
                self.lose([name], step)

    def _collect(self, name: str) -> None:
        sink = self._warning_sinks.get(name)
        for finding in self._guarded(name, sink.warnings_made, -1) or () if sink is not None else ():
            self._keep(finding)

    def _summarise(self) -> None:
        for name in self.sinks:
            lost = self.counts.of_this_run(name) if name in self.counts.before else None
            if lost is not None and lost.lost and lost.first is not None and lost.last is not None:
                steps = counted(lost.lost, "step") if lost.handed is None else f"{lost.lost} of {counted(lost.handed, 'step')}"
                span = f"{lost.first} to {lost.last}" if lost.lost > 1 else f"step {lost.first}"
                self._tell("error", f"the writer {name!r} lost {steps}, {span}: {self._why(name)}", lost.first)

    def _why(self, name: str) -> str:
        fault = self._records[name].fault
        return "its thread was ended" if fault is None else str(fault) if isinstance(fault, OSError) else fault_text(fault)

    def _that_have(self, method: str) -> dict[str, Any]:
        return {name: sink for name, sink in self.sinks.items() if hasattr(sink, method)}


def _on_host(key: str, data: Any) -> SavedTensor:
    return SavedTensor.of(key, data() if callable(data) else data)
