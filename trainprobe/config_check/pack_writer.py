"""Writes packs: each rank its own, atomically, while the run goes on; merged when it is over.

A rank of a job with several ranks writes `NAME.rank3.zip` beside the pack, and a job with one rank the pack itself. The
file is rewritten as a whole by a background thread, and put in place by a rename: whenever a run is killed, what is on disk
is a readable pack. Between two rewrites there are two seconds, and for a large pack 500 times what a rewrite takes, so
that writing stays below a fifth of a per cent of the time. Members are compressed once, when the pack is closed.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from trainprobe import __version__
from trainprobe.config_check.pack import CAPTURES, FORMAT, MANIFEST, VERSION, member_name
from trainprobe.engine.storage.safe_files import write_whole
from trainprobe.errors import OutputError

PAUSE = 2.0  # seconds between two rewrites while a run goes on
SHARE = 0.002  # of the time that may go into rewrites
_FAULTS = (OSError, ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def rank_path(path: Path, rank: int, world_size: int) -> Path:
    """Return the file that this rank writes."""
    return path if world_size == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.zip'}")


def to_json(content: Any) -> bytes:
    """Return content as JSON bytes; keys sorted where they are names, NaN and infinities as texts."""
    return orjson.dumps(_plain(content), option=orjson.OPT_INDENT_2)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if value != value:
            return "nan"
        return value if abs(value) != float("inf") else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(inner) for inner in value), key=str)
    return str(value)


class PackWriter:
    """Collects the members of one rank and keeps a readable pack of them on disk.

    Content may be a function: it is called on the writing thread, so that waiting for a device does not hold the training.
    """

    def __init__(self, path: Path, rank: int = 0, world_size: int = 1, captures: tuple[str, ...] = CAPTURES) -> None:
        self.path = rank_path(path, rank, world_size)
        self.rank = rank
        self.notes: list[str] = []
        self.fault: BaseException | None = None
        self._head = {"world_size": world_size, "ranks": [rank], "captures": list(captures)}
        self._members: dict[str, PackMember] = {}
        self._queue: list[tuple[str, Any, int]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._micro_steps = 0
        self._thread: threading.Thread | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.path.parent}: cannot make the folder of the pack: {error.strerror}") from None
        if self.path.is_dir():
            raise OutputError(f"{self.path}: is a folder, and the pack is a file: give a name such as pack.zip")

    def put(self, capture: str, content: Any, micro: int | None = None) -> None:
        """Add or replace one member; it reaches the disk soon."""
        with self._wake:
            self._queue.append((member_name(self.rank, capture, micro), content, 0 if micro is None else micro + 1))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trainprobe-config-check", daemon=True)
                self._thread.start()
            self._wake.notify()

    def note(self, sentence: str) -> None:
        """Add a sentence about what could not be captured."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def close(self, *, complete: bool = True) -> Path:
        """Write what is left and end; raises what the writing thread met."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        if self.fault is not None:
            raise self.fault
        self._take()
        self._write(complete=complete)
        return self.path

    def _run(self) -> None:
        written, pause = 0.0, PAUSE
        try:
            while True:
                with self._wake:
                    while not self._queue and not self._closing:
                        self._wake.wait()
                    rest = pause - (time.monotonic() - written)
                    if not self._closing and rest > 0 and written:
                        self._wake.wait(rest)
                    if self._closing:
                        return
                begun = time.monotonic()
                self._take()
                with suppress(OutputError):  # the disk may be full for a moment; the last attempt, of close(), tells
                    self._write(complete=False)
                written = time.monotonic()
                pause = max(PAUSE, (written - begun) / SHARE)
        except _FAULTS as fault:  # told by close(), in the thread of the caller
            self.fault = fault

    def _take(self) -> None:
        with self._wake:
            batch, self._queue = self._queue, []
        for name, content, micro_steps in batch:
            try:
                self._members[name] = PackMember(to_json(content() if callable(content) else content))
            except _FAULTS as fault:
                self.note(f"{name} was not captured: {type(fault).__name__}: {fault}")
                continue
            self._micro_steps = max(self._micro_steps, micro_steps)  # counts what is in the pack, not what waits for its turn

    def _write(self, *, complete: bool) -> None:
        head = self._head | {"complete": complete, "notes": list(self.notes), "micro_steps": self._micro_steps}
        _write_members(self.path, self._members, head, compress=complete or self._closing)


class PackMember:
    """The bytes of a member and their sha256, which is worked out once."""

    __slots__ = ("content", "sha256")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()


def write_zip(path: Path, members: Mapping[str, bytes], head: Mapping[str, Any]) -> None:
    """Write a pack at once and atomically: a temporary file beside it, then a rename."""
    _write_members(path, {name: PackMember(content) for name, content in members.items()}, head, compress=True)


def _write_members(path: Path, members: Mapping[str, PackMember], head: Mapping[str, Any], *, compress: bool) -> None:
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tool": f"trainprobe {__version__}",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **head,
        "members": {n: {"sha256": m.sha256, "bytes": len(m.content)} for n, m in sorted(members.items())},
    }
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", compresslevel=3) as archive:
        for name, content in ((MANIFEST, to_json(manifest)), *((n, m.content) for n, m in sorted(members.items()))):
            archive.writestr(zipfile.ZipInfo(name), content, method)  # without a date: a zip holds none before 1980
    try:
        write_whole(path, buffer.getvalue())
    except OSError as error:
        raise OutputError(f"{path}: cannot write the pack: {error.strerror or error}") from None
