"""Logs of other tools, which hold scalars by step: the rules over series judge them as they judge a run's own record.

Each file here is one format: `find(folder)` names what it reads there, `read(found)` yields (step, name, number). A folder is
read by the first format that is in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from trainprobe.engine.core.records import Place
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.left_out import tell
from trainprobe.errors import FormatError
from trainprobe.monitor.frames import Frame, SeriesTable, with_scalars
from trainprobe.monitor.scalar_logs import json_lines, tensorboard, trainer_state, wandb, wide_csv

FORMATS: tuple[ModuleType, ...] = (tensorboard, wandb, trainer_state, wide_csv, json_lines)
KNOWN = "TensorBoard event files, offline files of W&B, trainer_state.json, CSV or JSON lines with a `step`"
_BY_CHANCE = 3  # steps that may get a second number, as of an evaluation that is made again
_NOTHING = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.uint8))


def read_scalar_log(path: Path) -> Iterator[Frame] | None:
    """Return a frame for each step of a log of another tool, steps ascending; None where there is none.

    path: a folder, or one file. A number that was written twice for a step counts as it was written last; what that hides is
    told. Raises FormatError where a folder holds several logs, or one is damaged; MissingExtra where the client that reads it
    is not installed.
    """
    for form in FORMATS:
        found: list[list[Path]] = form.find(path)
        if len(found) > 1:
            names = ", ".join(str(log[0]) for log in found[:4]) + ", …" * (len(found) > 4)
            raise FormatError(f"{path} holds {len(found)} runs ({form.WHAT}): {names}. Name one of them")
        if found:
            return _frames(form.read(found[0]), path)
    return None


def _frames(numbers: Iterable[tuple[int, str, float]], path: Path) -> Iterator[Frame]:
    steps: dict[int, dict[str, float]] = {}
    last: dict[str, int] = {}
    hidden: dict[str, str] = {}  # of a scalar, the first number that is not finite and has another one in its place
    at_once: Counter[str] = Counter()  # how often a step got another number right behind one
    for step, name, number in numbers:
        row = steps.setdefault(step, {})
        before = row.get(name, number)
        at_once[name] += before != number and last.get(name) == step
        if math.isfinite(number) and not math.isfinite(before):
            hidden.setdefault(name, f"{name!r} of step {step} is {before}, and {number:g} behind that")
        row[name], last[name] = number, step
    for what in hidden.values():
        tell(f"{path}: {what}: the last one alone was judged")
    if often := [name for name, times in at_once.items() if times > _BY_CHANCE]:
        tell(
            f"{path}: {often[0]!r} has several numbers a step, in {counted(at_once[often[0]], 'row')}; the last one alone was "
            "judged. Do several ranks write it, or is each row given one step?"
        )
    table = SeriesTable()
    for step in sorted(steps):
        yield with_scalars(step, Place(0, 1), table, _NOTHING, steps[step], True)
