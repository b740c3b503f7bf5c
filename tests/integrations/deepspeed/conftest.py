"""Trainings that several modules of tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.deepspeed.parallel import Trained, names


@pytest.fixture(scope="session")
def trained(require, tmp_path_factory) -> Trained:
    require("deepspeed")
    folder = tmp_path_factory.mktemp("parallel")
    script = Path(__file__).with_name("train_parallel.py")
    for ranks in (2, 4):
        (folder / str(ranks)).mkdir()
        launch(script, ranks, str(folder / str(ranks)), *names(ranks), timeout=500)
    return Trained(folder)
