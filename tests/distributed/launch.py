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


def launch(script: str | Path, ranks: int, *arguments: str, timeout: float = 240, python: str = sys.executable) -> list[str]:
    """Run a script and return what each rank printed; raise RuntimeError with all of it when a rank fails.

    The process that has imported for it is kept until two other scripts are run: it may hold half a gigabyte.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    parent = _parent(python, str(script), path)
    port = str(free_port())
    environments = [{**os.environ, "PYTHONPATH": path, **rank_environment(rank, ranks, port)} for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
        told = [{"environment": env, "log": str(log)} for env, log in zip(environments, logs, strict=True)]
        job = {"arguments": arguments, "folder": str(Path.cwd()), "timeout": timeout, "ranks": told}
        codes = _answer(parent, job)
        printed = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    if any(code != 0 for code in codes):
        raise RuntimeError("\n".join(f"--- rank {r}, exit {codes[r]}\n{text[-8000:]}" for r, text in enumerate(printed)))
    return printed


_kept: dict[tuple[str, str, str], subprocess.Popen[str]] = {}  # the last two that were used


def _parent(python: str, script: str, path: str) -> subprocess.Popen[str]:
    """Return the process that has imported for a script, in a Python and with a PYTHONPATH."""
    kept = _kept.pop((python, script, path), None)
    while not kept and len(_kept) > 1:
        _kept.pop(next(iter(_kept))).communicate()
    if not kept:
        command = [python, "-m", "tests.distributed.ranks", script]
        environment = {**os.environ, **ON_A_CPU, "PYTHONPATH": path}
        kept = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _kept[python, script, path] = kept
    return kept


def _answer(parent: subprocess.Popen[str], job: dict) -> list[int | None]:
    assert parent.stdin is not None
    assert parent.stdout is not None
    too_late = threading.Timer(job["timeout"] + 120, parent.kill)  # its own clock begins when it has imported
    too_late.start()
    try:
        print(json.dumps(job), file=parent.stdin, flush=True)
        answer = parent.stdout.readline()
    finally:
        too_late.cancel()
    if not answer:
        del _kept[next(reversed(_kept))]
        raise RuntimeError(f"the process that imports for a script ended with {parent.wait()}: {parent.args}")
    return json.loads(answer)


def rank_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the variables by which a rank finds the others of its job, and frameworks need no device."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TRAINPROBE_ON_ERROR": "raise", **ON_A_CPU,
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
