"""The training's end of the link: a thread that sends the calls of judged steps and gathers verdicts, whatever the link does.

The training's thread only appends to a queue and takes finished findings from another. What is held is bounded by the room
that `HeldValues` had; what was sent and is not answered, by the server's window.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.op_check.dump import Row
from trainprobe.op_check.online.channels import Channel, first_of
from trainprobe.op_check.online.credentials import LINK_ERRORS, explained, is_about_certificates
from trainprobe.op_check.online.frames import FrameError, Kind, WireFrame
from trainprobe.op_check.online.messages import (
    CallVerdict,
    CannotSend,
    Hello,
    Sent,
    Welcome,
    call_frame,
    nbytes_of,
    read,
    write,
)
from trainprobe.op_check.recorded import RecordedRank, Unit
from trainprobe.op_check.training import RULE, Chosen, HeldValues, Verdicts

_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0
_QUIET = 3  # times the patience without a byte, until the link is taken as broken


class Refused(FrameError):  # noqa: N818  (named for what it says)
    """The server does not want this training; the message is its reason."""


@dataclass(slots=True)
class _Step:
    """A judged step. units: its calls that were not sent yet. waiting: how many were sent and not answered."""

    number: int
    values: HeldValues | None
    units: Iterator[Unit]
    nbytes: int
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    waiting: int = 0
    all_sent: bool = False


@dataclass(slots=True)
class _Pending:
    step: _Step
    unit: Unit
    nbytes: int


class Link:
    """Sends calls to a server and turns its verdicts into lines and findings.

    connect: makes a channel. server: its name in messages. patience: seconds after which silence is asked about.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Channel]],
        server: str,
        hello: Hello,
        chosen: Chosen,
        verdicts: Verdicts,
        place: Place,
        patience: float,
    ) -> None:
        self._connect, self._server, self._hello = connect, server, hello
        self._chosen, self._verdicts, self._place = chosen, verdicts, place
        self._patience = patience
        self._steps: deque[_Step] = deque()
        self._pending: dict[int, _Pending] = {}
        self._in_flight = 0  # bytes of pending calls
        self._number = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._said: set[str] = set()
        self.findings: deque[Finding] = deque()
        self.fault: BaseException | None = None
        self.sent = 0
        self.unanswered = 0
        self.breaks = 0
        self.left_out: Counter[str] = Counter()
        self._connected = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, about: None)  # of connections that have ended; nothing is printed
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="trainprobe-op-check", daemon=True)
        self._thread.start()

    # ---- called by the training's thread ---------------------------------------------------------------------------

    def offer(self, step_data: StepData, values: HeldValues) -> None:
        """Queue the calls of a step; returns at once."""
        units = RecordedRank(step_data, values).units()
        chosen = (unit for unit in units if unit in self._chosen)
        self._steps.append(_Step(step_data.step, values, chosen, values.nbytes))
        self._notify()

    @property
    def held(self) -> int:
        """Bytes of values that wait to be sent."""
        return sum(step.nbytes for step in [*self._steps])

    def close(self, wait_s: float) -> None:
        """End the link once all is answered, and at the latest after `wait_s` seconds."""
        self._closing = True
        self._notify()
        self._thread.join(wait_s)
        end = time.monotonic() + 5.0
        while self._thread.is_alive() and self._task is not None and time.monotonic() < end:
            self._call_soon(self._task.cancel)
            self._thread.join(1.0)  # cancelling once may not do: see `cancelled`
        for step in [*self._steps]:
            rest = 0 if step.all_sent or self._thread.is_alive() else sum(1 for _ in step.units)
            if rest:
                self.left_out["the run ended before the link had taken them"] += rest

    def _notify(self) -> None:
        self._call_soon(self._wake.set)

    def _call_soon(self, call: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            with suppress(RuntimeError):  # closed since
                self._loop.call_soon_threadsafe(call)

    # ---- the link's own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._task = self._loop.create_task(self._main())
        try:
            self._loop.run_until_complete(asyncio.wait([self._task]))
        finally:
            self.fault = None if self._task.cancelled() or not self._task.done() else self._task.exception()
            self._lose_pending()
            self._loop.close()

    async def _main(self) -> None:
        delay = _RETRY_S
        while True:
            last = self._closing
            try:
                await self._session()
                return
            except LINK_ERRORS as error:
                self._report(error)
            self._lose_pending()
            if last:
                return
            delay = _RETRY_S if self._connected else min(_LONGEST_RETRY_S, self._patience, 2 * delay)
            self._connected = False
            await self._pause(delay)

    async def _pause(self, delay: float) -> None:
        """Wait before the next attempt, but not when the run ends."""
        end = self._loop.time() + delay
        while not self._closing and self._loop.time() < end:
            self._wake.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), end - self._loop.time())

    async def _session(self) -> None:
        channel = await self._connect()
        try:
            await channel.send(write(Kind.HELLO, self._hello))
            answer = await asyncio.wait_for(channel.receive(), self._patience)
            if answer.kind == Kind.REFUSED:
                raise Refused(f"{self._server} refuses this training: {_reason(answer)}")
            welcome = read(answer, Welcome)
            self._connected = True
            await first_of(self._receive(channel), self._send(channel, welcome.window))
        finally:
            channel.close()

    async def _receive(self, channel: Channel) -> None:
        quiet = 0
        while True:
            try:
                frame = await asyncio.wait_for(channel.receive(), self._patience)
            except asyncio.TimeoutError:
                quiet = quiet + 1 if time.monotonic() - channel.progress >= self._patience else 0
                if quiet >= _QUIET:
                    raise
                await channel.send(WireFrame(Kind.PING, {}))
                continue
            quiet = 0
            if frame.kind == Kind.VERDICT:
                self._take(read(frame, CallVerdict))
            elif frame.kind == Kind.BYE:
                return
            elif frame.kind == Kind.REFUSED:
                raise Refused(f"{self._server} ends the link: {_reason(frame)}")
            elif frame.kind != Kind.PONG:
                raise FrameError(f"{self._server} sent a {frame.kind.name} frame, which only a training sends")

    async def _send(self, channel: Channel, window: int) -> None:
        while True:
            step = next((step for step in [*self._steps] if not step.all_sent), None)
            if step is not None:
                await self._send_next(channel, step, window)
            elif self._closing and not self._pending:
                counts = Sent(sent=self.sent, left_out=self.left_out.total(), unanswered=self.unanswered)
                await channel.send(write(Kind.BYE, counts))
                await asyncio.Event().wait()  # the server's BYE ends the session
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _send_next(self, channel: Channel, step: _Step, window: int) -> None:
        unit = next(step.units, None)
        if unit is None or step.values is None:
            step.all_sent, step.values, step.nbytes = True, None, 0
            self._finish(step)
            return
        try:
            frame = call_frame(self._number, step.number, unit, step.values)
        except (CannotSend, FrameError) as why:
            self.left_out[str(why)] += 1
            return
        nbytes = nbytes_of(frame)
        if nbytes > window:
            self.left_out[f"they are larger than the {window} bytes that the server holds: raise its --max-bytes"] += 1
            return
        while self._in_flight + nbytes > window:
            self._wake.clear()
            await self._wake.wait()
        self._pending[self._number] = _Pending(step, unit, nbytes)
        self._number += 1
        self._in_flight += nbytes
        step.waiting += 1
        self.sent += 1
        await channel.send(frame)

    def _take(self, verdict: CallVerdict) -> None:
        pending = self._pending.get(verdict.number)
        if pending is None:
            raise FrameError(f"{self._server} judged call {verdict.number}, which was not sent")
        step, unit = pending.step, pending.unit
        checked = verdict.checked(unit.direction)
        checked.note = "; ".join(text for text in (checked.note, verdict.nearer) if text)
        row = step.rows.get(-1 if verdict.equal_to is None else verdict.equal_to)
        if row is not None:
            row.equal += 1
        else:
            at = (step.number, self._place.rank)
            step.rows[verdict.number] = Row(*at, unit.entry, unit.call.name, unit.module, checked, unit=unit)
            step.rows[verdict.number].same_inputs = verdict.same_inputs
        self._forget(verdict.number)
        self._finish(step)

    def _forget(self, number: int) -> None:
        pending = self._pending.pop(number)
        pending.step.waiting -= 1
        self._in_flight -= pending.nbytes
        self._wake.set()

    def _finish(self, step: _Step) -> None:
        """Report a step whose calls are all answered, or lost."""
        if step.all_sent and not step.waiting and step in self._steps:
            self._steps.remove(step)
            if step.rows:
                self.findings.extend(self._verdicts.add([*step.rows.values()], step.number, self._place))

    def _lose_pending(self) -> None:
        """Count what was sent and will not be answered."""
        for number in [*self._pending]:
            step = self._pending[number].step
            self.unanswered += 1
            self._forget(number)
            self._finish(step)

    def _report(self, error: BaseException) -> None:
        """Say that there is no link, and why: once for all outages, and once for each refusal and fault of the keys."""
        self.breaks += self._connected
        lasting = is_about_certificates(error) or isinstance(error, FrameError)
        text = explained(error, self._server)
        key = text if lasting else "outage"
        if key in self._said:
            return
        self._said.add(key)
        head = "the link to the reference machine broke" if self._connected else "there is no link to the reference machine"
        message = f"{head}: {text}; the training goes on, and the link is tried again"
        advice = "look at what the server prints, and at the keys of both sides (`trainprobe op-check certs` makes new ones)"
        if not lasting:
            advice = "see that `trainprobe op-check serve` runs and can be reached; the end of the run says what was not judged"
        self.findings.append(Finding(RULE, "warning", message, place=self._place, next=advice))


def _reason(frame: WireFrame) -> str:
    reason = frame.header.get("reason")
    return reason[:500] if isinstance(reason, str) else "it does not say why"
