"""Where a rank stands on the parallel axes, against the device matrix that MindSpore lays out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore.parallel import Layout

from trainprobe.integrations import mindspore_place
from trainprobe.integrations.mindspore_place import axes_of, declared_place


@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2, "tp": 2}, {"dp": 4, "tp": 2}, {"tp": 8}, {"dp": 8}])
def test_indices_within_a_stage_are_those_of_mindspores_device_matrix(sizes: dict[str, int]) -> None:
    shape = tuple(sizes.get(axis, 1) for axis in ("dp", "cp", "tp"))
    told = Layout(shape, ("dp", "cp", "tp"))("dp", "cp", "tp").to_dict()  # as MindFormers writes it for its operators
    assert told["rank_list"] == list(range(8))  # row by row over the device matrix
    assert list(told["device_matrix"]) == list(shape)
    for rank in range(8):
        where = dict(zip(("dp", "cp", "tp"), np.unravel_index(told["rank_list"].index(rank), shape), strict=True))
        assert axes_of(sizes, rank, 8) == {axis: (int(where[axis]), size) for axis, size in sizes.items()}


def test_stages_are_slowest_and_experts_lie_across_dp() -> None:
    sizes = {"dp": 4, "tp": 2, "pp": 2, "ep": 2}
    assert axes_of(sizes, 13, 16) == {"dp": (2, 4), "tp": (1, 2), "pp": (1, 2), "ep": (0, 2)}
    assert axes_of(sizes, 13, 32) == {}  # not the sizes of this world
    assert axes_of({}, 0, 1) == {}


@pytest.fixture
def rank_five_of_eight(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RANK_ID", "5")
    monkeypatch.setenv("RANK_SIZE", "8")
    yield mindspore_place.place_of_process()
    ms.reset_auto_parallel_context()


def test_the_configuration_of_a_model_comes_before_mindspores_settings(rank_five_of_eight: Any) -> None:
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2)
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel=2, model_parallel=2, pipeline_stage=2))
    told = declared_place(SimpleNamespace(config=config))
    assert told is not None
    assert told.axes == {"dp": (0, 2), "tp": (1, 2), "pp": (1, 2)}
    mcore = SimpleNamespace(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    told = declared_place(SimpleNamespace(config=mcore))
    assert told is not None
    assert told.axes == {"tp": (1, 4), "pp": (1, 2)}
    told = declared_place(object())
    assert told is not None
    assert told.axes == {"dp": (1, 4), "pp": (1, 2)}


def test_data_parallel_mode_tells_and_no_mode_tells_nothing(rank_five_of_eight: Any) -> None:
    assert rank_five_of_eight.axes == {"dp": (5, 8)}
    assert declared_place(object()) is None
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    told = declared_place(object())
    assert told is not None
    assert told.axes == {"dp": (5, 8)}
