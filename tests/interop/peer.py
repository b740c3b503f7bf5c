"""The Python that mindstudio-probe is installed in (TRAINPROBE_MSPROBE_PYTHON, see docs/interop.md), where there is one."""

from __future__ import annotations

import os

import pytest

PEER = os.environ.get("TRAINPROBE_MSPROBE_PYTHON") or None
if PEER is None and os.environ.get("CI") == "true":
    raise RuntimeError("CI exchanges files with mindstudio-probe itself: TRAINPROBE_MSPROBE_PYTHON must name its Python")
needs_peer = pytest.mark.skipif(
    PEER is None, reason="TRAINPROBE_MSPROBE_PYTHON does not name a Python with mindstudio-probe==26.2.0 and torch"
)
