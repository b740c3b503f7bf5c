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
    mindspore.set_context(pynative_synchronize=True)


def _asynchronous(item: pytest.Item) -> tuple[bool, bool]:
    """Return whether a file has tests that run as MindSpore does by itself, and whether this is one of them."""
    named = getattr(getattr(item, "module", None), "ASYNCHRONOUS", ())
    return bool(named), named == "all" or getattr(item, "originalname", item.name) in named


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the asynchronous tests last: the threads that they start spin from then on."""
    files = {item.path: i for i, item in reversed([*enumerate(items)])}
    if HERE:
        items.sort(key=lambda item: (_asynchronous(item)[0], files[item.path], _asynchronous(item)[1]))


@pytest.fixture(autouse=True)
def _synchronous(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have PyNative mode wait for each operator: its threads spin while they wait, which is most of a tiny training's CPU time.

    Tests that a file names in ASYNCHRONOUS, and programs in processes of their own, run as MindSpore does by itself. The
    numbers are the same to the bit (`test_model.py`).
    """
    mindspore.set_context(pynative_synchronize=not _asynchronous(request.node)[1])
    yield
    mindspore.set_context(pynative_synchronize=True)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that fails writes files where it stands."""
    monkeypatch.chdir(tmp_path)
