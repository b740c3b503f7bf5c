"""Histories keep what stood out, in bounded memory."""

import numpy as np
import pytest
from frames_by_hand import frame, grads
from hypothesis import given
from hypothesis import strategies as st

from trainprobe.monitor.frames import SeriesTable
from trainprobe.monitor.history import History


def fill(values, capacity):
    history, table = History(capacity), SeriesTable()
    for step, x in enumerate(values):
        history.add(frame(step, table, *(grads({"w": x}) if x is not None else [])))
    return history


def test_a_series_that_fits_holds_every_value_at_its_step():
    history = fill([1.0, 2.0, None, 4.0], 64)
    steps, values = history.get(history.series[0])
    assert steps.tolist() == [0, 1, 3]
    assert values.tolist() == [1.0, 2.0, 4.0]


@given(st.lists(st.floats(0.1, 10.0), min_size=40, max_size=200), st.data())
def test_joining_columns_keeps_the_largest_value_of_each_column(values, data):
    values = [float(np.float32(v)) for v in values]
    values[data.draw(st.integers(0, len(values) - 1))] = 1e6
    history = fill(values, 16)
    _, got = history.get(history.series[0])
    every = history.every
    assert len(got) <= 16
    assert got.tolist() == [max(values[i : i + every]) for i in range(0, len(values), every)]


def test_a_nan_survives_the_joining_of_columns():
    history = fill([float("nan") if step == 37 else 1.0 for step in range(100)], 16)
    steps, values = history.get(history.series[0])
    (at,) = np.flatnonzero(np.isnan(values))
    assert steps[at] <= 37 < steps[at] + history.every


def test_ten_thousand_steps_take_no_more_memory_than_the_capacity():
    history, table = History(256), SeriesTable()
    for step in range(10_000):
        history.add(frame(step, table, *grads({"a": 1.0, "b": 2.0})))
    assert history.matrix([0, 1])[0].shape[1] <= 256
    assert history._values.nbytes <= 8 * 256 * 4


def test_a_track_that_comes_later_is_absent_before():
    history, table = History(64), SeriesTable()
    history.add(frame(0, table, *grads({"a": 1.0})))
    history.add(frame(1, table, *grads({"a": 1.0, "b": 2.0})))
    _, present = history.matrix([1])
    assert present.tolist() == [[False, True]]


@pytest.mark.parametrize("wanted", ["a", "b"])
def test_only_wanted_tracks_are_kept(wanted):
    history, table = History(64, lambda t: t.address.name == wanted), SeriesTable()
    history.add(frame(0, table, *grads({"a": 1.0, "b": 2.0})))
    assert [t.address.name for t in history.series] == [wanted]
