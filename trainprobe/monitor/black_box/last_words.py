"""What a process says at a fatal signal: where its threads were, written by C code that needs no Python (`faulthandler`).

SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL write the stacks of all threads to `black_box.fault`, unless somebody else has
switched `faulthandler` on; SIGTERM writes that of the main thread to `black_box.terminated`. Afterwards each does at once what
it would have done without: the process ends with the same status, or a handler that was there before runs. Nothing waits for
the interpreter, so a process whose main thread is held up in C dies as well. A forked child has none of this.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any, BinaryIO

from trainprobe.engine.storage.safe_files import LARGEST_TEXT, open_private, read_bounded

FAULT_FILE, TERMINATED_FILE = "black_box.fault", "black_box.terminated"
_alive: dict[int, LastWords] = {}


class LastWords:
    """Listens to fatal signals from when it is made until `close`, which removes the files that stayed empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._files: list[BinaryIO] = []
        self._faults = not faulthandler.is_enabled() and not _alive
        self._handler: Any = None
        self._terminated = not _alive and hasattr(faulthandler, "register")
        for name in (FAULT_FILE, TERMINATED_FILE):
            (folder / name).unlink(missing_ok=True)
        if self._faults:
            faulthandler.enable(self._open(FAULT_FILE), all_threads=True)
        if self._terminated:
            self._handler = signal.getsignal(signal.SIGTERM)
            # of this thread alone, the main one: others may run meanwhile, and to walk their stacks would be a fault of its own
            faulthandler.register(signal.SIGTERM, self._open(TERMINATED_FILE), all_threads=False, chain=True)
        _alive[id(self)] = self

    def close(self) -> None:
        """Listen no more; safe to call twice."""
        _alive.pop(id(self), None)
        if self._faults:
            faulthandler.disable()
        replaced = self._terminated and signal.getsignal(signal.SIGTERM) is not self._handler
        if self._terminated and not replaced:  # to unregister would undo the handler that somebody has set since
            faulthandler.unregister(signal.SIGTERM)
        self._faults = self._terminated = False
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
        self._files.append(open_private(self._folder / name, "wb", buffering=0))  # type: ignore[arg-type]
        return self._files[-1]


def _after_fork() -> None:
    """Take a child's signals back: what it is sent is no word about its parent."""
    for words in list(_alive.values()):
        words.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def last_words(folder: Path) -> str | None:
    """Return what a folder's files say of a fatal signal: its name and the stacks, or None."""
    fault, terminated = folder / FAULT_FILE, folder / TERMINATED_FILE
    for path, head in ((fault, ""), (terminated, "SIGTERM\n\n")):
        if path.exists() and path.stat().st_size:
            return head + read_bounded(path, LARGEST_TEXT, follow=True).decode(errors="replace").strip()
    return None
