"""The Pythons that mindstudio-probe is installed in (TRAINPROBE_MSPROBE_PYTHON, see docs/interop.md), where there are any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PEER = os.environ.get("TRAINPROBE_MSPROBE_PYTHON") or None
if PEER is None and os.environ.get("CI") == "true":
    raise RuntimeError("CI exchanges files with mindstudio-probe itself: TRAINPROBE_MSPROBE_PYTHON must name its Python")
needs_peer = pytest.mark.skipif(
    PEER is None, reason="TRAINPROBE_MSPROBE_PYTHON does not name a Python with mindstudio-probe==26.2.0 and torch"
)


def _older() -> dict[str, str]:
    """Return release → the Python that has it: the environments of older releases lie beside that of the newest."""
    if PEER is None:
        return {}
    folder = Path(PEER).parents[2]
    found = {release: folder / f"msprobe-{release.rpartition('.')[0]}/bin/python" for release in ("1.3.0", "8.1.1")}
    missing = [str(path) for path in found.values() if not path.exists()]
    if missing and os.environ.get("CI") == "true":
        raise RuntimeError(f"CI needs the older releases of mindstudio-probe too: {', '.join(missing)}")
    return {} if missing else {release: str(path) for release, path in found.items()}


OLDER = _older()
needs_older = pytest.mark.skipif(
    not OLDER, reason="beside TRAINPROBE_MSPROBE_PYTHON lie no msprobe-1.3 and msprobe-8.1 (make .venvs/msprobe-1.3/.ready)"
)
