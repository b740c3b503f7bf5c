"""Run a script again and again, each time in new processes, with everything that it imports imported only once.

    python forked.py SCRIPT

imports SCRIPT, which has a function `main`, and then reads jobs from standard input, one JSON object a line: `arguments` of
the script and, for each rank, its `environment` and the file of its output. Each rank is a fork that calls `main`. The answer
is a line with the exit codes; null stands for a rank that was killed because another one failed or time was up.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.distributed.launch import ON_A_CPU, ROOT, free_port, rank_environment
from tests.distributed.one_rank import settle


class ForkedScript:
    """Runs one script in any number of ranks; the process that imports it starts with the first run and ends with `close`."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._parent: subprocess.Popen[str] | None = None

    def run(self, ranks: int, *arguments: str, timeout: float = 240) -> None:
        """Run the script; raise RuntimeError with all output when a rank fails."""
        parent = self._parent = self._parent or _start(self._script)
        assert parent.stdin is not None
        assert parent.stdout is not None
        port = str(free_port())
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
            told = [{"environment": rank_environment(r, ranks, port), "log": str(log)} for r, log in enumerate(logs)]
            print(json.dumps({"arguments": arguments, "timeout": timeout, "ranks": told}), file=parent.stdin, flush=True)
            answer = parent.stdout.readline()
            if not answer:
                raise RuntimeError(f"the process that imports {self._script} ended with {parent.wait()}")
            codes = json.loads(answer)
            if any(code != 0 for code in codes):
                said = (log.read_text()[-8000:] if log.exists() else "" for log in logs)
                raise RuntimeError("\n".join(f"--- rank {r}, exit {codes[r]}\n{text}" for r, text in enumerate(said)))

    def close(self) -> None:
        """End the process that imports the script."""
        if self._parent is not None:
            self._parent.communicate()
            self._parent = None


def _start(script: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, **ON_A_CPU, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", __name__, str(script)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _serve(script: str) -> None:
    sys.path.insert(0, str(Path(script).resolve().parent))
    main = runpy.run_path(script, run_name="imported")["main"]
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        for rank in job["ranks"]:
            child = os.fork()
            if not child:
                _run(main, [script, *job["arguments"]], rank)
                return
            children.append(child)
        print(json.dumps(_wait_for(children, job["timeout"])), flush=True)


def _run(main: Callable[[], None], arguments: list[str], rank: dict) -> None:
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT, 0o600)
    for stream, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(to, stream)
    os.environ.update(rank["environment"])
    sys.argv = arguments
    atexit.register(settle)
    main()


def _wait_for(children: list[int], timeout: float) -> list[int | None]:
    codes: dict[int, int | None] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(children) and time.monotonic() < end:
        for child in set(children) - set(codes):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, time.monotonic() + 2)  # let the others say why
        time.sleep(0.02)
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        codes[child] = None
    return [codes[child] for child in children]


if __name__ == "__main__":
    _serve(sys.argv[1])
