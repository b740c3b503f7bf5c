"""Run a script in n processes that find each other over gloo, with a time limit; end only those processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.distributed.launch import ONE_RANK, free_port, rank_environment


def launch(n: int, script: Path, *arguments: str, timeout: float = 240) -> str:
    """Run `script` in n ranks and return rank 0's output; raise RuntimeError with all output when a rank fails."""
    port = str(free_port())
    command = [sys.executable, str(ONE_RANK), str(script), *arguments]
    ranks = []
    for rank in range(n):
        env = {**os.environ, **rank_environment(rank, n, port)}
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed below, after the process has ended)
        ranks.append((subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT), log))
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and any(p.poll() is None for p, _ in ranks):
        if any(p.poll() not in (None, 0) for p, _ in ranks):
            time.sleep(2)
            break
        time.sleep(0.05)
    for process, _ in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()
    outputs = []
    for _, log in ranks:
        log.seek(0)
        outputs.append(log.read())
        log.close()
    if any(p.returncode for p, _ in ranks):
        raise RuntimeError(
            "\n".join(
                f"--- rank {r}, exit {p.returncode}\n{o[-8000:]}"
                for r, ((p, _), o) in enumerate(zip(ranks, outputs, strict=True))
            )
        )
    return outputs[0]


if __name__ == "__main__":
    print(launch(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
