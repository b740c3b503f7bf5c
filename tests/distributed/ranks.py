"""The process whose forks are the ranks of a script: `python -m tests.distributed.ranks SCRIPT`, started by launch.py.

It imports what SCRIPT imports and then reads jobs from standard input, one JSON object a line: `arguments` of the script,
the `folder` that it is run in, how long it may take (`timeout`, seconds) and, for each of its `ranks`, its `environment` and
the file of its output (`log`). The answer is a line with the exit codes; null stands for a rank that was killed because another
one failed or time was up.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from tests.distributed.one_rank import settle

# what trainprobe imports when a program asks for it, with all that it rests on
_LATE = (
    *(
        "watching",
        "run.composition",
        "run.torch_taps",
        "run.torch_backend",
        "engine.storage.sinks.dump",
        "engine.storage.sinks.csv",
    ),
    *("integrations.trainer_mon", "integrations.torch_loop", "monitor.watcher", "config_check.checker", "dump_compare.classic"),
    *("engine.storage.run_log.rows", "engine.storage.sinks.parquet"),
)


def import_for(script: Path) -> None:
    """Import what the script imports: run what stands before the last import that is not within a function."""
    body = ast.parse(script.read_text()).body
    last = max((i for i, node in enumerate(body) if isinstance(node, (ast.Import, ast.ImportFrom))), default=-1)
    names = {"__name__": "imported", "__file__": str(script)}
    for node in body[: last + 1]:
        with contextlib.suppress(Exception):  # what needs the environment of a rank, which will say so if it fails there too
            exec(compile(ast.Module([node], []), str(script), "exec"), names)
    import_late()


def import_late() -> None:
    """Import what torch and trainprobe, where they are there, import at the first step: a second of CPU for each child."""
    if torch := sys.modules.get("torch"):
        torch.optim.SGD([torch.zeros(1)], 0.1).step()
    if "trainprobe" in sys.modules:
        for name in _LATE:
            importlib.import_module(f"trainprobe.{name}")


def _serve(script: Path) -> None:
    sys.path[0] = str(script.parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by what is imported is no answer
    import_for(script)
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        for rank in job["ranks"]:
            child = os.fork()
            if not child:
                answers.close()
                os.chdir(job["folder"])
                _run(script, job["arguments"], rank)
                return
            children.append(child)
        print(json.dumps(_wait_for(children, job["timeout"])), file=answers, flush=True)


def _run(script: Path, arguments: list[str], rank: dict) -> None:
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT, 0o600)
    for stream, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(to, stream)
    os.environ.clear()
    os.environ.update(rank["environment"])
    sys.argv = [str(script), *arguments]
    atexit.register(settle)
    runpy.run_path(str(script), run_name="__main__")


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
    _serve(Path(sys.argv[1]).resolve())
