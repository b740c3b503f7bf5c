"""Roads for frames: TCP, with TLS or without, and a shared folder. All belong to one event loop."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import time
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from trainprobe.engine.storage.safe_files import read_bounded, write_whole
from trainprobe.op_check.online.frames import LONGEST_HEADER, PREFIX_BYTES, Decoder, FrameError, WireFrame, encode

_PIECE = 1 << 18
_LINGER_S = 1.0


async def first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Do several things at once until one of them ends, and raise what ended it; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        await cancelled(tasks)
    faults = {task: task.exception() for task in tasks if not task.cancelled()}  # asked of all, or asyncio complains
    for task in ended:
        fault = faults[task]
        if fault is not None:
            raise fault


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and return when all have ended. Before Python 3.12 `wait_for` may swallow a cancellation: it is repeated."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)


class Channel(Protocol):
    """One connection. progress: `time.monotonic()` when a byte last came, or a part of a payload last went."""

    @property
    def progress(self) -> float: ...

    async def send(self, frame: WireFrame) -> None:
        """Send a frame. Raises OSError, TimeoutError where the other side takes nothing for `patience` seconds."""
        ...

    async def receive(self) -> WireFrame:
        """Return the next frame. Raises OSError, EOFError at the end, FrameError."""
        ...

    def allow(self, most: int) -> None:
        """Accept payloads of this many bytes; before, none is."""
        ...

    async def linger(self) -> None:
        """Wait a moment until the other side has read what was sent last."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Stream:
    """Bytes over TCP. With a context they are encrypted here, so that what the other side refuses is said before the end."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: float,
        context: ssl.SSLContext | None = None,
        host: str | None = None,
    ) -> None:
        self._reader, self._writer, self._patience = reader, writer, patience
        self.progress = time.monotonic()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = (
            None if context is None else context.wrap_bio(self._in, self._out, server_side=host is None, server_hostname=host)
        )

    async def handshake(self) -> None:
        """Agree on keys. Raises OSError (ssl.SSLError for certificates), EOFError, TimeoutError."""
        while self._tls is not None:
            try:
                self._tls.do_handshake()
                await self._flush()
                return
            except ssl.SSLWantReadError:
                await self._flush()
            except ssl.SSLError:
                await self._flush()  # the alert that says why
                raise
            await asyncio.wait_for(self._fill(), self._patience)

    async def read(self) -> bytes:
        """Return what came next. Raises EOFError at the end."""
        if self._tls is None:
            data = await self._reader.read(_PIECE)
            if not data:
                raise EOFError
            self.progress = time.monotonic()
            return data
        while True:
            try:
                data = self._tls.read(_PIECE)
                if not data:
                    raise EOFError
                return data
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                raise EOFError from None

    async def write(self, data: bytes) -> None:
        """Send bytes. Raises OSError, TimeoutError."""
        if self._tls is None:
            self._writer.write(data)
        else:
            self._tls.write(data)
        await self._flush()

    async def _fill(self) -> None:
        data = await self._reader.read(_PIECE)
        if not data:
            raise EOFError
        self.progress = time.monotonic()
        self._in.write(data)

    async def _flush(self) -> None:
        if self._out.pending:
            self._writer.write(self._out.read())
        await self._drain()

    async def _drain(self) -> None:
        """Wait until the other side has taken most of what was written; give up where it takes nothing."""
        stalled: list[bool] = []

        def give_up() -> None:
            stalled.append(True)
            self._writer.transport.abort()

        timer = asyncio.get_running_loop().call_later(self._patience, give_up)
        try:
            await self._writer.drain()
        except ConnectionError:
            if stalled:
                raise asyncio.TimeoutError from None
            raise
        finally:
            timer.cancel()

    async def linger(self) -> None:
        """Let the other side read what was written last, which closing at once would take from it."""
        with suppress(OSError, asyncio.TimeoutError):
            self._writer.write_eof()
            await asyncio.wait_for(self._drained(), _LINGER_S)

    async def _drained(self) -> None:
        while await self._reader.read(_PIECE):
            pass

    def close(self) -> None:
        """Close at once, whatever is still on its way."""
        self._writer.transport.abort()


class StreamChannel:
    """Frames over a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._decoder = Decoder(0)
        self._frames: list[WireFrame] = []
        self._sending = asyncio.Lock()

    @property
    def progress(self) -> float:
        """See Channel."""
        return self.stream.progress

    def allow(self, most: int) -> None:
        """See Channel."""
        self._decoder.most = most

    async def send(self, frame: WireFrame) -> None:
        """See Channel."""
        head = encode(frame)
        async with self._sending:
            await self.stream.write(head)
            for start in range(0, len(frame.payload), _PIECE):
                await self.stream.write(frame.payload[start : start + _PIECE])
                self.stream.progress = time.monotonic()

    async def receive(self) -> WireFrame:
        """See Channel."""
        while not self._frames:
            self._frames.extend(self._decoder.feed(await self.stream.read()))
        return self._frames.pop(0)

    async def linger(self) -> None:
        """See Channel."""
        await self.stream.linger()

    def close(self) -> None:
        """See Channel."""
        self.stream.close()


TO_SERVER, TO_TRAINING = "to_server", "to_training"


class FolderChannel:
    """Frames as files of a folder, numbered in order; a file is read once and removed. folder: of one session."""

    def __init__(self, folder: Path, *, server: bool) -> None:
        self._folder = folder
        self._inbox, self._outbox = (folder / name for name in ((TO_SERVER, TO_TRAINING)[:: 1 if server else -1]))
        self._most = 0
        self._read = self._written = 0
        self.progress = time.monotonic()
        if not server:
            folder.mkdir(mode=0o700)
            self._inbox.mkdir()
            self._outbox.mkdir()

    def allow(self, most: int) -> None:
        """See Channel."""
        self._most = most

    async def send(self, frame: WireFrame) -> None:
        """See Channel."""
        write_whole(self._outbox / _file(self._written), encode(frame) + frame.payload)
        self._written += 1

    async def receive(self) -> WireFrame:
        """See Channel."""
        path = self._inbox / _file(self._read)
        wait = 0.02
        while not path.exists():
            if not self._folder.exists():
                raise EOFError
            await asyncio.sleep(wait)
            wait = min(1.0, wait * 1.5)
        decoder = Decoder(self._most)
        frames = [*decoder.feed(read_bounded(path, PREFIX_BYTES + LONGEST_HEADER + self._most))]
        path.unlink(missing_ok=True)
        self.progress = time.monotonic()
        self._read += 1
        if len(frames) != 1 or not decoder.between_frames:
            raise FrameError(f"{path} is not one frame")
        return frames[0]

    async def linger(self) -> None:
        """See Channel."""
        for _ in range(50):
            if not self._folder.exists():
                return
            await asyncio.sleep(_LINGER_S / 50)

    def close(self) -> None:
        """See Channel. The folder is removed."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _file(number: int) -> str:
    return f"{number:010}.frame"
