"""The frame of a step whose layout is known is the one that a walk over its calls gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

import trainprobe
from trainprobe.engine.core.step_layout import StepLayout
from trainprobe.engine.stats.partials import PARTIALS, STATISTICS, finish
from trainprobe.monitor import frames
from trainprobe.monitor.rules.spike import _of_ordered


class Branches(torch.nn.Module):
    """Takes one of two ways, so that steps differ; one output is empty and one parameter has no gradient on one way."""

    def __init__(self):
        super().__init__()
        self.ways = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)])
        self.rest = torch.nn.Identity()

    def forward(self, x, way):
        self.rest(x[:0])
        return self.ways[way](self.ways[0](x))


def test_known_layouts_are_those_of_a_walk(tmp_path):
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    monitor = {"activation_gradients": True, "optimizer_state": True, "rules": []}
    by_layout, by_walk = frames.SeriesTable(), frames.SeriesTable()
    layouts = set()
    with trainprobe.watch(model, optimizer, level="off", output=tmp_path, monitor=monitor) as probe:
        for step in range(6):
            probe.begin_step()
            optimizer.zero_grad()
            model(torch.randn(3, 4), step % 2).square().mean().backward()
            optimizer.step()
            step_data = probe.end_step()
            assert step_data is not None
            known = frames.frame_of_step(step_data, by_layout)
            alone = dataclasses.replace(step_data)
            alone.layout = StepLayout()
            walked = frames.frame_of_step(alone, by_walk)
            layouts.add(id(known.at))
            assert [by_layout.series[t] for t in known.at] == [by_walk.series[t] for t in walked.at]
            assert [by_layout.addresses[s] for s in known.addresses] == [by_walk.addresses[s] for s in walked.addresses]
            np.testing.assert_array_equal(known.values, walked.values)
            np.testing.assert_array_equal(known.health, walked.health)
    assert len(layouts) < 6  # steps that are alike have one layout


def test_statistics_of_finite_rows_are_those_of_any_row():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, len(PARTIALS)))
    rows[:, 0] = rng.integers(1, 99, 200)
    rows[:, 1:4] = 0
    rows[:, 8] = np.abs(rows[:, 8]) * 10.0 ** rng.integers(-300, 300, 200)
    rows[:, 10] = rng.choice([0, 600, -600], 200)
    odd = np.ones((2, len(PARTIALS)))  # a row with a NaN and two infinities, and one without elements
    odd[1, 0] = 0
    among = finish(np.concatenate([rows, odd]), STATISTICS)
    for name, numbers in finish(rows, STATISTICS).items():
        np.testing.assert_array_equal(numbers, among[name][:200])


def test_the_median_of_a_window_and_the_distance_from_it_are_numpys():
    x = np.random.default_rng(0).normal(size=(129, 128))
    for i, row in enumerate(x[:128]):
        row[i + 1 :] = np.nan
    np.testing.assert_array_equal(_of_ordered(np.sort(x, axis=1)), np.nanmedian(x, axis=1))
