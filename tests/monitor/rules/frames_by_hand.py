"""Frames made by hand, for a rule to judge."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainprobe.engine.core.records import Place, Record, Site, Step
from trainprobe.monitor.frames import Frame, SeriesTable, frame_of_records
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.watcher import Watcher


def value(phase: str, kind: str, name: str, slot: str, shape=(4, 4), call=0, **numbers: float) -> tuple:
    return phase, Site(kind, name, slot, call), shape, numbers


def frame(step: int, table: SeriesTable, *values: tuple, rank: int = 0, **scalars: float) -> Frame:
    """Return a frame of values (in order of execution) and scalars."""
    place = Place(rank, 2)
    told = [Record(Step(step, None, phase), place, site, "f32", shape, numbers) for phase, site, shape, numbers in values]
    for name, number in scalars.items():
        told.append(Record(Step(step, None, "step"), place, Site("scalar", name, "value"), "f64", (), {"value": number}))
    return frame_of_records(step, place, told, table)


class Bench:
    """One rule with settings; feed it steps and look at what it found."""

    def __init__(self, rule: str, **settings) -> None:
        self.watcher = Watcher({rule: make_rules({rule: settings or True})[rule]})
        self.step = 0
        self.found = []

    def feed(self, *values: tuple, **scalars: float) -> list:
        new = self.watcher.judge(frame(self.step, self.watcher.table, *values, **scalars))
        self.found += new
        self.step += 1
        return new


def grads(norms: Mapping[str, float]) -> list[tuple]:
    return [value("backward", "parameter", name, "grad", norm=norm) for name, norm in norms.items()]


def weight(name, norm, shape=(4, 4)):
    return value("forward", "parameter", name, "value", shape, norm=norm, absmax=norm / 2, mean=norm / 9)


def output(name, norm, zeros=0.0):
    return value("forward", "module", name, "output", norm=norm, zero=zeros * 100, count=100)


def noisy(rng, level=1.0):
    return float(level * np.exp(rng.normal(0, 0.1)))
