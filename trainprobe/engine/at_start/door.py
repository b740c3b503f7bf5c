"""`TRAINPROBE=plan.yaml torchrun train.py`: what each Python process does at its start where that variable is set.

`trainprobe.pth` in site-packages calls `open_door`. It costs nothing before the process imports a framework, and nothing at
all without the variable. A process that never imports one is not touched.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "TRAINPROBE"
DEFAULT = ("1", "on", "true", "default")
OFF = ("0", "off", "false")
_FRAMEWORKS = ("torch", "mindspore")
_ATTACH = "trainprobe.integrations.auto_attach"


def is_off() -> bool:
    """Tell whether the tool is switched off, also in scripts that import it."""
    return os.environ.get(VARIABLE, "").lower() in OFF


def open_door() -> None:
    """Wait for a framework, unless `trainprobe run` started this process."""
    value = os.environ.get(VARIABLE, "")
    if value and not is_off() and "TRAINPROBE_AT_START" not in os.environ:
        plan = "default" if value.lower() in DEFAULT else str(Path(value).absolute())
        os.environ.setdefault("TRAINPROBE_RUN", plan)
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    """A finder of modules that finds nothing; the first search for a framework has the tool attach to it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname in _FRAMEWORKS:
            sys.meta_path.remove(self)
            importlib.import_module(_ATTACH).at_start()
