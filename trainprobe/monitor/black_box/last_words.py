"""What a process says at a fatal signal: the stacks of all threads, written by C code that needs no Python (`faulthandler`).

SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL write to `black_box.fault`, unless somebody else has switched `faulthandler` on;
SIGTERM writes to `black_box.terminated`. Afterwards each does what it would have done without: the process ends with the same
status, or a handler that was there before runs. A forked child has none of this.

A process that SIGTERM would kill is in good health: a thread of its own wakes up, has what is not yet on disk written, for at
most ten seconds, and then lets the signal kill. Training is not asked to stop for it, so it need not be able to.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

FAULT_FILE, TERMINATED_FILE = "black_box.fault", "black_box.terminated"
SECONDS = 10.0  # that a process which SIGTERM kills lives on at most
_QUIET = 0.5  # seconds without a word after which C code has said all
_ROOM = 1 << 20  # bytes of stacks; more are cut off, as nobody may wait for a reader
_NOTHING = b"\0"  # tells the thread to end
_alive: dict[int, LastWords] = {}


class LastWords:
    """Listens to fatal signals from when it is made until `close`, which removes the files that stayed empty.

    before_death: is called, on a thread of its own, before SIGTERM kills.
    """

    def __init__(self, folder: Path, before_death: Callable[[], object] = lambda: None) -> None:
        self._folder = folder
        self._before_death = before_death
        self._pid = os.getpid()
        self._files: list[BinaryIO] = []
        self._faults = not faulthandler.is_enabled() and not _alive
        self._handler: Any = None
        self._terminated = not _alive and hasattr(faulthandler, "register")
        self._listener: threading.Thread | None = None
        self._said: int | None = None  # where C code writes what the thread reads
        for name in (FAULT_FILE, TERMINATED_FILE):
            (folder / name).unlink(missing_ok=True)
        if self._faults:
            faulthandler.enable(self._open(FAULT_FILE), all_threads=True)
        if self._terminated:
            self._handler = signal.getsignal(signal.SIGTERM)
            kills = self._handler == signal.SIG_DFL
            faulthandler.register(
                signal.SIGTERM, self._listen() if kills else self._open(TERMINATED_FILE), all_threads=True, chain=not kills
            )
        _alive[id(self)] = self

    def close(self) -> None:
        """Listen no more; safe to call twice. Does not return when SIGTERM is about to kill."""
        _alive.pop(id(self), None)
        if self._said is not None and self._listener is not None and os.getpid() == self._pid:
            os.write(self._said, _NOTHING)
            self._listener.join()
        if self._faults:
            faulthandler.disable()
        replaced = self._terminated and signal.getsignal(signal.SIGTERM) is not self._handler
        if self._terminated and not replaced:  # to unregister would undo the handler that somebody has set since
            faulthandler.unregister(signal.SIGTERM)
        if self._said is not None and not replaced:
            os.close(self._said)
        self._faults = self._terminated = False
        self._listener = self._said = None
        files, self._files = self._files, []
        for file in files:
            if os.getpid() == self._pid:
                path = Path(os.fsdecode(file.name))
                if path.exists() and not path.stat().st_size:
                    path.unlink()
            if not (replaced and file.name.endswith(TERMINATED_FILE)):  # C may still hold its number
                file.close()

    def _open(self, name: str) -> BinaryIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files.append((self._folder / name).open("wb", buffering=0))  # type: ignore[arg-type]
        return self._files[-1]

    # ---- SIGTERM that kills --------------------------------------------------------------------------------------------

    def _listen(self) -> int:
        """Start the thread, and return the end of a pipe that C code writes stacks to and never waits for."""
        heard, self._said = os.pipe()
        os.set_blocking(self._said, False)
        _widen(self._said)
        file = self._open(TERMINATED_FILE)
        self._listener = threading.Thread(target=self._hear, args=(heard, file), name="trainprobe-signals", daemon=True)
        self._listener.start()
        return self._said

    def _hear(self, heard: int, file: BinaryIO) -> None:
        text = os.read(heard, _ROOM)
        while select.select([heard], [], [], 0.0 if text == _NOTHING else _QUIET)[0]:
            text += os.read(heard, _ROOM)
        os.close(heard)
        if text == _NOTHING:
            return
        file.write(text.replace(_NOTHING, b""))
        worker = threading.Thread(target=self._before_death, name="trainprobe-last-words", daemon=True)
        worker.start()
        worker.join(SECONDS)
        faulthandler.unregister(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()  # whoever waits for this thread waits for the end


def _widen(pipe: int) -> None:
    """Have a pipe hold more than 64 KiB, where that can be."""
    try:
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _ROOM)
    except (ImportError, AttributeError, OSError):
        return


def _after_fork() -> None:
    """Take a child's signals back: what it is sent is no word about its parent."""
    for words in list(_alive.values()):
        words.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def last_words(folder: Path) -> str | None:
    """Return what a folder's files say of a fatal signal: its name and the stacks, or None."""
    fault, terminated = folder / FAULT_FILE, folder / TERMINATED_FILE
    if fault.exists() and fault.stat().st_size:
        return fault.read_text(errors="replace").strip()
    if terminated.exists() and terminated.stat().st_size:
        return "SIGTERM\n\n" + terminated.read_text(errors="replace").strip()
    return None
