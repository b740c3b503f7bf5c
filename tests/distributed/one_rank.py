"""Runs a script as one rank, and lets the process end only when the threads of its collectives are at rest.

python one_rank.py SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import atexit
import gc
import runpy
import sys
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


def settle(timeout: float = 10.0) -> None:
    """Wait, without the interpreter's lock, until all other threads of this process sleep, at most `timeout` seconds.

    A thread of gloo lets go of a collective's tensors after the collective has returned, and needs the lock for that. A
    process that ends meanwhile is aborted, with torch alone too (pytorch issue 190489).
    """
    gc.collect()  # process groups that nobody holds join their threads
    end, calm = time.monotonic() + timeout, 0
    while calm < 3 and time.monotonic() < end:
        time.sleep(0.002)
        calm = calm + 1 if _others_sleep() else 0


def _others_sleep() -> bool:
    try:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in _TASKS.iterdir()]
    except FileNotFoundError:
        return False  # one of them has ended meanwhile
    return states.count("R") <= 1 and set(states) <= {"R", "S"}  # this one runs


if __name__ == "__main__":
    atexit.register(settle)  # the first to be registered is the last to be called
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
