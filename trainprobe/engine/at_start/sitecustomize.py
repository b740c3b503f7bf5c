"""Python runs this file when it starts in an environment of `trainprobe.engine.at_start.environment_for`.

Its folder stands first on PYTHONPATH for that command only. A sitecustomize that the program has itself is run as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


def _call_all() -> None:
    """Call what is to be called at the start."""
    for module in filter(None, os.environ.get("TRAINPROBE_AT_START", "").split(",")):
        importlib.import_module(module).at_start()


def _run_the_other() -> None:
    """Run the sitecustomize that this one stands before."""
    for folder in sys.path:
        other = Path(folder or ".") / "sitecustomize.py"
        if str(Path(folder or ".").resolve()) != _HERE and other.is_file():
            spec = importlib.util.spec_from_file_location("sitecustomize", other)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


_call_all()
_run_the_other()
