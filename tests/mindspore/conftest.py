"""The tests of this folder run in an environment of their own, which holds MindSpore and no PyTorch (`make test` runs both)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("mindspore") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    import mindspore

    mindspore.set_device("CPU")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that fails writes files where it stands."""
    monkeypatch.chdir(tmp_path)
