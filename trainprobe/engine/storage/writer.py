"""The background thread that writes: collected steps wait in a bounded queue, and none is dropped silently.

If the queue is full, the training waits (back-pressure). A step is written at once, but the thread wakes at most once in
WAKE_INTERVAL_S, because waking it costs training time. A sink that gathers steps is asked to write them BATCH_WINDOW after the
first of them was submitted. A sink that fails (disk full, no permission) loses the step at which it failed and is tried again
at the next. A finding reports the first failure, and another at the end how many steps were lost. The other sinks and the
training continue. A thread that dies is replaced. A forked child inherits a writer that ignores every call: its parent writes.
At the exit of the interpreter, or of a process of `multiprocessing`, the queue is written for a bounded time.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import multiprocessing.util
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.findings_file import open_findings
from trainprobe.engine.storage.dumps.layout import LOG_FILE, STEPS_FILE, existing_of_rank, has_run_log, log_folder
from trainprobe.engine.storage.safe_files import private_folder
from trainprobe.engine.storage.sink_calls import Job, SinkCalls
from trainprobe.engine.storage.sinks import Sink
from trainprobe.engine.storage.step_counts import StepCounts
from trainprobe.errors import OutputError, PlanError, UsageError

EXIT_SECONDS = 60.0
WAKE_INTERVAL_S = 0.1  # seconds
MANY_ROWS = 1 << 15  # where more rows than that wait, or tensors, there is room for few steps
FEW_STEPS = 8


_FLUSH = Job("flush", (), 0, 0, -1)


_open: weakref.WeakSet[Writer] = weakref.WeakSet()  # those of this process that were not closed


def flush_all() -> None:
    """Wait until what this process has handed to any writer is on disk: for code that reads what it has just written."""
    for writer in list(_open):
        writer.flush()


class Writer:
    """Hands collected steps, tensors and findings to the sinks on a thread of its own.

    sinks: name → sink. on_error: "raise" makes the next call here raise the fault of a sink. report: receives each finding of
    the writer, on the writer's thread. max_steps, max_bytes: how much may wait (tensors count by their bytes, one larger
    than the bound may wait alone; of large collected steps, and with tensors, no more than FEW_STEPS). counts: of the steps
    that each sink was given and lost.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        *,
        place: Place | None = None,
        on_error: str = "continue",
        report: Callable[[Finding], None] | None = None,
        max_steps: int = 32,
        max_bytes: int = 256 << 20,
        counts: StepCounts | None = None,
    ) -> None:
        self.counts = counts or StepCounts(sinks)
        self._calls = SinkCalls(sinks, self.counts, self._report, self._keep)
        self.sinks: Mapping[str, Sink] = self._calls.sinks
        self._place = place
        self._raise = on_error == "raise"
        self._on_finding = report
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self.hand_in: Callable[[], object] = lambda: (
            None
        )  # hands over what is still on its way here; not on the writer's thread
        self._findings: list[Finding] = []
        self._jobs: deque[Job] = deque()
        self._collected_steps = 0
        self._rows = 0
        self._bytes = 0
        self._busy = False
        self._asleep = False  # the thread waits for the next job
        self._hurry = False  # it is to write now, although more may follow
        self._closed = False
        self._ended = False  # the thread has done all that it had to
        self._stopped = False  # it ends, or has ended
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = self._start()
        _open.add(self)
        atexit.register(self.close, EXIT_SECONDS)
        self._finalizer: Any = None
        if multiprocessing.parent_process() is not None:  # a process of `multiprocessing` that was forked skips atexit
            self._finalizer = multiprocessing.util.Finalize(None, self.close, (EXIT_SECONDS,), exitpriority=100)

    @property
    def takes_tensors(self) -> bool:
        """Whether a sink takes values of tensors, now."""
        return self._calls.takes_tensors

    def _start(self) -> threading.Thread:
        self._stopped = False
        thread = threading.Thread(target=self._run, name="trainprobe-writer", daemon=True)
        thread.start()
        return thread

    def _look_after_thread(self) -> None:
        """Replace a thread that something has ended."""
        if not (self._ended or self._alive()):
            self._thread = self._start()
            self._report("error", "the writer's thread had ended before its work was done: another one goes on", None)

    # ---- from the training's side --------------------------------------------------------------------------------

    def submit(self, step_data: StepData) -> None:
        """Hand over a finished collected step; it must not be changed afterwards. Waits while the queue is full."""
        names = self._calls.that_take(step_data)
        self._put(Job("write", (step_data,), 0, len(step_data.partials), step_data.step, names, time.monotonic()))

    def submit_tensor(self, step: int, key: str, data: Any) -> None:
        """Hand over one value of a step, before the step data that refer to it by `key`. Waits while too many bytes are queued.

        data: what `SavedTensor.of` takes, or a function that returns it and is called on the writer's thread (where it may
        wait for a copy from a device that is under way); nothing changes it afterwards.
        """
        if self.takes_tensors:
            self._put(Job("tensor", (step, key, data), int(getattr(data, "nbytes", 0)), 0, step))

    def submit_chunk(self, step: int, chunk: Any) -> None:
        """Hand over many values of a step at once, as the compiled tape gathers them. Waits while too many bytes are queued."""
        if self.takes_tensors:
            self._put(Job("chunk", (step, chunk), chunk.nbytes, 0, step))

    def submit_findings(self, findings: Sequence[Finding]) -> None:
        """Hand over findings for the sinks that keep them."""
        if findings:
            self._put(Job("findings", (tuple(findings),), 0, 0, -1))

    def submit_counts(self, findings: Sequence[Finding]) -> None:
        """Hand over findings again that were seen at more steps since, for the sinks that keep their counts."""
        if findings:
            self._put(Job("counts", (tuple(findings),), 0, 0, -1))

    def findings(self) -> list[Finding]:
        """Return and forget what the writer itself has to say: sinks that failed, budgets reached."""
        with self._changed:
            findings, self._findings = self._findings, []
        return findings

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was handed over is on disk; return whether it is."""
        if os.getpid() != self._pid:
            return True
        self._ask_for_the_rest()
        self._look_after_thread()
        with self._changed:
            if self._calls.gathering and not self._closed:
                self._jobs.append(_FLUSH)
            self._wake()
            done = self._changed.wait_for(lambda: not self._alive() or not (self._jobs or self._busy), timeout)
        self._raise_fault()
        return done and not self._jobs

    def close(self, timeout: float | None = EXIT_SECONDS) -> None:
        """Write what is queued, close the sinks and end the thread, within `timeout` seconds; safe to call twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self._ask_for_the_rest()
        attempt(self._look_after_thread, otherwise=fault_text)  # at the end of the interpreter none can be started
        with self._changed:
            self._closed = True
            self._wake()
        _open.discard(self)
        atexit.unregister(self.close)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._thread.join(timeout)
        if self._thread.is_alive():
            waiting = len(self._jobs)
            self._report(
                "error",
                f"{waiting} pieces of data still waited to be written after {timeout:.0f} s: they are lost",
                None,
            )
        self._raise_fault()

    def _ask_for_the_rest(self) -> None:
        if not self._closed and threading.current_thread() is not self._thread:
            self.hand_in()

    def _put(self, job: Job) -> None:
        if os.getpid() != self._pid:
            return
        self._raise_fault()
        self._look_after_thread()
        with self._changed:
            if self._closed:
                raise UsageError(f"step {job.step} was handed to a writer that is closed; make a new probe to record more")
            if not self._room(job.bytes):
                self._changed.wait_for(lambda: self._room(job.bytes) or not self._alive())
            self._jobs.append(job)
            self._bytes += job.bytes
            self._rows += job.rows
            self._collected_steps += job.verb == "write"
            if job.verb == "write":
                self.counts.hand(name for name in job.names if name in self.counts.sinks)
            if self._asleep or job.verb != "write" or 4 * self._collected_steps >= 3 * self._most_steps():
                self._wake()

    def _wake(self) -> None:
        self._hurry = True
        self._changed.notify_all()

    def _room(self, size: int) -> bool:
        return self._collected_steps < self._most_steps() and (self._bytes == 0 or self._bytes + size <= self._max_bytes)

    def _most_steps(self) -> int:
        return self._max_steps if self._rows < MANY_ROWS and not self._bytes else min(FEW_STEPS, self._max_steps)

    def _alive(self) -> bool:
        return not self._stopped and self._thread.is_alive()

    def _raise_fault(self) -> None:
        if not self._raise or threading.current_thread() is self._thread:
            return
        for name, fault in self._calls.faults():
            if not isinstance(fault, ConnectionError):  # a service ends no training
                self._raise = False
                raise OutputError(f"the writer {name!r} failed: {fault}") from fault

    # ---- on the writer's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            attempt(self._calls.flush, otherwise=fault_text)  # what takes long to load is loaded now
            while (job := self._next()) is not None:
                self._do(job)
                del job
            self._calls.close()
            self._ended = True
        finally:  # also where something ends the thread: nobody waits for it
            with self._changed:
                self._busy, self._stopped = False, True
                self._changed.notify_all()

    def _do(self, job: Job) -> None:
        done = False
        try:
            fault = attempt(self._calls.carry_out, job, otherwise=lambda fault: fault)
            if self._calls.are_due():
                self._calls.flush()
            done = fault is None
            if isinstance(fault, Exception):
                self._report("error", f"what was handed to the writer at step {job.step} is lost: {fault_text(fault)}", None)
        finally:
            with self._changed:
                if job.verb == "write" and not done:
                    self._calls.lose(job.names, job.step)
                self._busy = False
                self._bytes -= job.bytes
                self._rows -= job.rows
                self._collected_steps -= job.verb == "write"
                self._changed.notify_all()

    def _next(self) -> Job | None:
        """Return what is to be done next; None when all is done and the writer closed."""
        with self._changed:
            if not self._jobs:
                self._hurry = False
                self._changed.wait_for(lambda: self._hurry or self._closed, WAKE_INTERVAL_S)
            self._asleep = True
            left = None if self._calls.due is None else max(0.0, self._calls.due - time.monotonic())
            self._changed.wait_for(lambda: self._jobs or self._closed, left)
            self._asleep = False
            if not self._jobs and self._closed:
                return None
            self._busy = True
            return self._jobs.popleft() if self._jobs else _FLUSH

    def _report(self, severity: Any, message: str, step: int | None) -> None:
        self._keep(Finding("writer", severity, message, step=step, place=self._place))

    def _keep(self, finding: Finding) -> None:
        with self._changed:
            self._findings.append(finding)
        if finding.severity != "info":
            say(finding.message, severity=finding.severity, finding=finding)
        if threading.current_thread() is self._thread:
            self._calls.hand_findings((finding,))
        if self._on_finding is not None:
            self._on_finding(finding)


def open_writer(
    plan: Plan, place: Place, report: Callable[[Finding], None] | None = None, more: Mapping[str, Sink] | None = None
) -> Writer:
    """Open the sinks that a plan names and a writer for them and for `more`, which are there already.

    Raises OutputError when a sink's place is taken or cannot be written.
    A sink is a file of `engine.storage.sinks`, or what another package brings under the entry point group `trainprobe.sinks`.
    """
    sinks: dict[str, Sink] = {}
    folder = log_folder(plan.output, place.rank)
    try:
        private_folder(plan.output)
        if not os.access(plan.output, os.W_OK):
            raise PermissionError(f"no permission to write to {plan.output}")
        dumps = [path for path in existing_of_rank(plan.output, place.rank) if not path.name.startswith(".")]
        known = not (dumps or has_run_log(folder) or (folder / LOG_FILE).exists())
        for name in plan.sinks:
            sinks[name] = _opener(name)(plan.output, plan, place)
        afresh = plan.on_existing == "replace"
        counts = StepCounts(plan.sinks, folder / STEPS_FILE if sinks else None, afresh=afresh, known=known or afresh)
        if sinks:
            sinks["findings"] = open_findings(plan, place)
    except OSError as error:
        for sink in sinks.values():
            sink.close()
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"{plan.output} cannot be written: {error}; choose another `output`") from error
    return Writer({**sinks, **(more or {})}, place=place, on_error=plan.on_error, report=report, counts=counts)


def _opener(name: str) -> Callable[[Path, Plan, Place], Sink]:
    own = f"trainprobe.engine.storage.sinks.{name}"
    if importlib.util.find_spec(own) is not None:
        return importlib.import_module(own).open
    for point in importlib.metadata.entry_points(group="trainprobe.sinks", name=name):
        return point.load()
    raise PlanError(f"{name!r} is not a writer: no file {own}, and no package brings one of that name")
