"""The tests of this folder run in an environment of their own, which holds MindSpore and no PyTorch (`make test` runs both).

    pytest tests/mindspore                     all tests, as MindSpore runs by itself: PyNative mode is asynchronous
    pytest --pynative waits tests/mindspore    without those that are about that, and PyNative mode waits for each operator
    pytest --pynative free tests/mindspore     those alone

The threads of PyNative mode spin while they wait, which is half of the CPU time of trainings as tiny as these; the numbers are
the same to the bit. `make` runs the second and the third, in processes of their own: MindSpore 2.9 fails in LayerNormGrad where
one process waits at first and then does not.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("mindspore") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pynative", choices=("waits", "free"), default="", help="whether PyNative mode waits for each operator")


def pytest_configure(config: pytest.Config) -> None:
    if HERE:
        import mindspore

        mindspore.set_device("CPU")
        if config.getoption("--pynative", "") == "waits":
            mindspore.set_context(pynative_synchronize=True)


def _asynchronous(item: pytest.Item) -> bool:
    """Return whether a test is one of those that its file names in ASYNCHRONOUS: they run as MindSpore does by itself."""
    named = getattr(getattr(item, "module", None), "ASYNCHRONOUS", ())
    return named == "all" or getattr(item, "originalname", item.name) in named


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the other process runs."""
    kind = config.getoption("--pynative", "")  # unknown where pytest came here from the folder above
    if not kind:
        return
    left_out = [
        item for item in items if item.path.parent == Path(__file__).parent and _asynchronous(item) == (kind == "waits")
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that fails writes files where it stands."""
    monkeypatch.chdir(tmp_path)
