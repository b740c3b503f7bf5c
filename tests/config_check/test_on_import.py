"""Waiting for a module to be imported."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from trainprobe.config_check.capture.on_import import ImportWatch


@pytest.fixture
def name(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "waited_for"
    sys.modules.pop("waited_for", None)


def test_two_watches_of_one_module_that_was_looked_for_before_are_both_called(name):
    called = []
    watches = [ImportWatch(), ImportWatch()]
    for number, watch in enumerate(watches):
        watch.wait_for(name, lambda module, number=number: called.append(number))
    assert importlib.util.find_spec(name) is not None
    assert called == []
    importlib.import_module(name)
    for watch in watches:
        watch.stop()
    assert sorted(called) == [0, 1]
