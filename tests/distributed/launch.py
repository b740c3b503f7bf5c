"""Run scripts in ranks that talk over gloo.

    python -m tests.distributed.launch RANKS SCRIPT ARGUMENTS...

The ranks of a job are forks of one process that has imported what the script imports (ranks.py), which for most scripts is
more work than what they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ONE_RANK = Path(__file__).with_name("one_rank.py")
ON_A_CPU = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip


def launch(script: str | Path, ranks: int, *arguments: str, timeout: float = 240) -> list[str]:
    """Run a script once and return what each rank printed; raise RuntimeError with all of it when a rank fails."""
    with contextlib.closing(ForkedScript(script)) as forked:
        return forked.run(ranks, *arguments, timeout=timeout)


class ForkedScript:
    """Runs one script any number of times; the process that imports for it starts with the first and ends with `close`."""

    def __init__(self, script: str | Path) -> None:
        self._script = script
        self._parent: subprocess.Popen[str] | None = None

    def run(self, ranks: int, *arguments: str, timeout: float = 240) -> list[str]:
        """Run the script and return what each rank printed; raise RuntimeError with all of it when a rank fails."""
        parent = self._parent = self._parent or self._start()
        assert parent.stdin is not None
        assert parent.stdout is not None
        port = str(free_port())
        too_late = threading.Timer(timeout + 120, parent.kill)  # its own clock begins when it has imported
        too_late.start()
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
            at_end.callback(too_late.cancel)
            logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
            told = [{"environment": rank_environment(r, ranks, port), "log": str(log)} for r, log in enumerate(logs)]
            print(json.dumps({"arguments": arguments, "timeout": timeout, "ranks": told}), file=parent.stdin, flush=True)
            answer = parent.stdout.readline()
            if not answer:
                raise RuntimeError(f"the process that imports for {self._script} ended with {parent.wait()}")
            codes = json.loads(answer)
            printed = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        if any(code != 0 for code in codes):
            raise RuntimeError("\n".join(f"--- rank {r}, exit {codes[r]}\n{text[-8000:]}" for r, text in enumerate(printed)))
        return printed

    def close(self) -> None:
        """End the process that imports for the script."""
        if self._parent is not None:
            self._parent.communicate()
            self._parent = None

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **ON_A_CPU, "PYTHONPATH": path, "TRAINPROBE_ON_ERROR": "raise"}
        command = [sys.executable, "-m", "tests.distributed.ranks", str(self._script)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def rank_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the variables by which a rank finds the others of its job, and frameworks need no device."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **ON_A_CPU,
    }  # fmt: skip


def free_port() -> int:
    """Return a TCP port that nothing listens on, below those that the system gives to outgoing connections.

    One of those could be taken by another test's processes before the one that it is meant for has started.
    """
    while True:
        port = secrets.choice(range(10_000, 32_000))
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


if __name__ == "__main__":
    print(launch(sys.argv[2], int(sys.argv[1]), *sys.argv[3:])[0])
