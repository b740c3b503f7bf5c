"""The reference machine: it takes calls of trainings over TCP or a shared folder, judges them and sends the verdicts back."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainprobe.engine.core.guard import fault_text
from trainprobe.op_check.judge import Judgement, Tolerance
from trainprobe.op_check.online.channels import TO_SERVER, Channel, FolderChannel, Stream, StreamChannel, cancelled, first_of
from trainprobe.op_check.online.credentials import LINK_ERRORS, explained
from trainprobe.op_check.online.frames import FrameError, Kind, WireFrame
from trainprobe.op_check.online.judging import CallJudge
from trainprobe.op_check.online.messages import (
    CallVerdict,
    Hello,
    Sent,
    SentCall,
    Welcome,
    judgements_as_json,
    nbytes_of,
    read,
    read_call,
    write,
)
from trainprobe.op_check.online.reports import Report

_QUIET = 4  # times the patience without a frame, until a training is taken as gone
_SESSION = re.compile(r"session-[A-Za-z0-9_.-]{1,200}")
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server judges. ranks: which may come, None for all. device: runs each call too ("" does not).

    most: bytes of calls that are held, over all connections. patience: seconds that a silent connection is waited for.
    once: end when every training that came has ended.
    """

    output: Path
    ranks: frozenset[int] | None = None
    device: str = ""
    most: int = 4 << 30
    connections: int = 4
    patience: float = 30.0
    once: bool = False


@dataclass(slots=True)
class _Session:
    """One training's connection. calls: that arrived and are not judged. held: their bytes."""

    hello: Hello
    judge: CallJudge
    task: asyncio.Task[None] | None
    calls: deque[WireFrame] = field(default_factory=deque[WireFrame])
    held: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    bye: Sent | None = None


class Server:
    """Serves until it is cancelled, or with `once` until the last training has ended. say: prints one line."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._window = max(1, settings.most // settings.connections)
        self._reports: dict[tuple[str, int], Report] = {}
        self._sessions: dict[tuple[str, int], _Session] = {}
        self._waiting = 0  # connections that have not said who they are
        self._finished = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "judge")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def reports(self) -> Sequence[Report]:
        """The reports of all ranks that came."""
        return [*self._reports.values()]

    async def serve_tcp(self, host: str, port: int, secure: ssl.SSLContext | None) -> asyncio.Server:
        """Begin to listen. Raises OSError."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = Stream(reader, writer, self._settings.patience, secure)
            self._start(self._greet(stream, writer.get_extra_info("peername")))

        return await asyncio.start_server(accept, host, port)

    async def serve_folder(self, folder: Path) -> None:
        """Look for sessions in a shared folder, for ever."""
        known: set[str] = set()
        while True:
            there = {p.name for p in folder.iterdir() if _SESSION.fullmatch(p.name) and p.is_dir() and not p.is_symlink()}
            known &= there
            for name in sorted(there - known):
                if any((folder / name / TO_SERVER).glob("0*.frame")):
                    known.add(name)
                    self._start(self._hold(FolderChannel(folder / name, server=True), name))
            await asyncio.sleep(_LOOK_S)

    async def finished(self) -> None:
        """Return when the last training has ended; only with `once`."""
        await self._finished.wait()

    async def close(self) -> None:
        """End all sessions and write what is not written."""
        await cancelled([*self._tasks])
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            self._say(f"a connection was dropped: {fault_text(fault)}")

    async def _greet(self, stream: Stream, peer: object) -> None:
        """Agree on keys with whoever has connected."""
        name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) > 1 else "a training"
        channel = StreamChannel(stream)
        if self._waiting >= 4 * self._settings.connections:
            channel.close()
            return
        self._waiting += 1
        try:
            await asyncio.wait_for(stream.handshake(), self._settings.patience)
        except LINK_ERRORS as error:
            self._say(f"{name} was not let in: {explained(error, 'the training')}")
            await channel.linger()
            channel.close()
            return
        finally:
            self._waiting -= 1
        await self._hold(channel, name)

    async def _hold(self, channel: Channel, name: str) -> None:
        """Serve one connection to its end."""
        session: _Session | None = None
        try:
            session = await self._admitted(channel, name)
            if session is not None:
                await self._serve(channel, session)
        except LINK_ERRORS as error:
            said = f"rank {session.hello.rank} of {session.hello.run}" if session is not None else name
            self._say(f"the link to {said} ended: {explained(error, 'the training')}")
        finally:
            if session is not None:
                self._leave(session)
            channel.close()

    async def _admitted(self, channel: Channel, name: str) -> _Session | None:
        first = await asyncio.wait_for(channel.receive(), self._settings.patience)
        if first.kind != Kind.HELLO:
            raise FrameError(f"{name} did not begin with a HELLO frame")
        hello = read(first, Hello)
        key = hello.run, hello.rank
        why = self._why_not(hello)
        if why:
            self._say(f"rank {hello.rank} of {hello.run} was refused: {why}")
            await channel.send(WireFrame(Kind.REFUSED, {"reason": why}))
            await channel.linger()
            return None
        before = self._sessions.get(key)
        if before is not None and before.task is not None:  # its link broke, which was not noticed here yet
            await cancelled([before.task])
        report = self._reports.get(key) or Report(self._settings.output, *key)
        self._reports[key] = report
        tolerance = None if hello.atol is None or hello.rtol is None else Tolerance(hello.atol, hello.rtol)
        judge = CallJudge(report, hello.rank, tolerance, self._settings.device, self._settings.most)
        session = self._sessions[key] = _Session(hello, judge, asyncio.current_task())
        self._say(f"rank {hello.rank} of {hello.run} is here ({name}); its report is in {report.folder}")
        channel.allow(self._window)
        await channel.send(write(Kind.WELCOME, Welcome(window=self._window, here=self._settings.device)))
        return session

    def _why_not(self, hello: Hello) -> str:
        ranks = self._settings.ranks
        if ranks is not None and hello.rank not in ranks:
            return f"this server judges ranks {', '.join(map(str, sorted(ranks)))} alone (its --ranks)"
        if (hello.run, hello.rank) not in self._sessions and len(self._sessions) >= self._settings.connections:
            return f"{len(self._sessions)} trainings are connected, and it takes no more at once (its --connections)"
        return ""

    async def _serve(self, channel: Channel, session: _Session) -> None:
        await first_of(self._judge(channel, session), self._receive(channel, session))
        await channel.linger()

    async def _receive(self, channel: Channel, session: _Session) -> None:
        """Take frames as they come. The window bounds what is held, so that nothing here waits for the judge."""
        while True:
            frame = await self._next(channel)
            if frame.kind == Kind.CALL:
                session.held += nbytes_of(frame)
                if session.held > self._window:
                    raise FrameError(f"the training sent more than the {self._window} bytes that it was granted")
                session.calls.append(frame)
            elif frame.kind == Kind.PING:
                await channel.send(WireFrame(Kind.PONG, {}))
            elif frame.kind == Kind.BYE:
                session.bye = read(frame, Sent)
            else:
                raise FrameError(f"the training sent a {frame.kind.name} frame, which only a server sends")
            session.wake.set()

    async def _next(self, channel: Channel) -> WireFrame:
        quiet = _QUIET * self._settings.patience
        while True:
            try:
                return await asyncio.wait_for(channel.receive(), quiet)
            except asyncio.TimeoutError:
                if time.monotonic() - channel.progress >= quiet:
                    raise

    async def _judge(self, channel: Channel, session: _Session) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while session.calls:
                frame = session.calls.popleft()
                verdict = await loop.run_in_executor(self._pool, self._verdict, frame, session)
                session.held -= nbytes_of(frame)
                await channel.send(write(Kind.VERDICT, verdict))
            if session.bye is not None:
                session.judge.report.end(session.bye.model_dump())
                await channel.send(WireFrame(Kind.BYE, {"report": session.judge.report.sentence()[:1000]}))
                return
            session.wake.clear()
            await session.wake.wait()

    def _verdict(self, frame: WireFrame, session: _Session) -> CallVerdict:
        """Judge a call; one that cannot be read is not checked, with the reason. Raises FrameError where it has no number."""
        try:
            call: SentCall = read_call(frame, session.hello.rank)
        except FrameError as why:
            number = frame.header.get("number")
            if not isinstance(number, int):
                raise
            text = f"what arrived of it cannot be read: {why}"
            session.judge.report.add_unread(text)
            return CallVerdict(number=number, judgements=judgements_as_json([Judgement("not checked", text)]))
        return session.judge(call)

    def _leave(self, session: _Session) -> None:
        del self._sessions[session.hello.run, session.hello.rank]
        report = session.judge.report
        if session.bye is None:
            report.lost += len(session.calls)
            report.end({})
        self._say(f"rank {session.hello.rank} of {session.hello.run}: {report.sentence()}")
        if self._settings.once and not self._sessions and session.bye is not None:
            self._finished.set()
