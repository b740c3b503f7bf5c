"""Start real processes that talk over gloo, wait for all of them, and show what they said when one fails."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ONE_RANK = Path(__file__).with_name("one_rank.py")


def launch(script: str, ranks: int, *arguments: str, folder: Path, timeout: float = 120) -> None:
    """Run `script` (a path, or a name beside this file) in `ranks` processes; AssertionError with their output if one fails."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TRAINPROBE_ON_ERROR": "raise",
    }
    command = [sys.executable, str(ONE_RANK), str(ONE_RANK.parent / script), *arguments]
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    running = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = wait_for(running, timeout)
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * ranks, "\n".join(f"--- rank {r}: {codes[r]}\n{log.read_text()[-3000:]}" for r, log in enumerate(logs))


ON_A_CPU = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip


def rank_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the variables by which a rank finds the others of its job, and frameworks need no device."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **ON_A_CPU,
    }  # fmt: skip


def wait_for(running: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Wait until all have ended, one has failed, or time is up; return their exit codes, None for one that still ran."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in running]
        if None not in codes:
            break
        if any(codes):
            time.sleep(2)  # let the others say why
            break
        time.sleep(0.05)
    return [process.poll() for process in running]


def free_port() -> int:
    """Return a TCP port that nothing listens on, below those that the system gives to outgoing connections.

    One of those could be taken by another test's processes before the one that it is meant for has started.
    """
    while True:
        port = secrets.choice(range(10_000, 32_000))
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port
