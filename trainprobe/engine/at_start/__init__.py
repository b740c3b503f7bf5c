"""Has a function called when a program that was not edited starts, and in each Python process that the program starts."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TRAINPROBE_AT_START"  # modules whose `at_start()` is called, separated by commas; `sitecustomize` reads it


def environment_for(module: str) -> dict[str, str]:
    """Return this process's environment with `module.at_start()` to be called in each Python process that is started in it."""
    here = Path(__file__).parent
    own = str(here), str(here.parents[2])
    modules = [name for name in os.environ.get(VARIABLE, "").split(",") if name not in ("", module)]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *own)]
    path = os.pathsep.join([own[0], *paths, own[1]])
    return {**os.environ, VARIABLE: ",".join([*modules, module]), "PYTHONPATH": path}
