"""The tests of this folder run in an environment of their own, which holds MindSpore and no PyTorch (`make test` runs both)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("mindspore") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    import mindspore

    mindspore.set_device("CPU")


@pytest.fixture(autouse=True)
def _synchronous(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have PyNative mode wait for each operator: its threads spin while they wait, which is most of a tiny training's CPU time.

    Tests that a file names in ASYNCHRONOUS, and programs in processes of their own, run as MindSpore does by itself. The
    numbers are the same to the bit (`test_model.py`).
    """
    asynchronous = getattr(request.module, "ASYNCHRONOUS", ())
    waits = asynchronous != "all" and getattr(request.function, "__name__", "") not in asynchronous
    mindspore.set_context(pynative_synchronize=waits)
    yield
    mindspore.set_context(pynative_synchronize=False)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that fails writes files where it stands."""
    monkeypatch.chdir(tmp_path)
