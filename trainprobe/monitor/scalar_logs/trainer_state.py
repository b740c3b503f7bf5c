"""`trainer_state.json` of the Hugging Face Trainer, whose last one of a run holds all that was logged before.

The Trainer replaces a loss that is not finite by the mean of the others, unless `logging_nan_inf_filter=False`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.left_out import damaged_as
from trainprobe.engine.storage.safe_files import LARGEST_TEXT, read_bounded
from trainprobe.errors import FormatError
from trainprobe.monitor.scalar_logs.rows import scalars_of, step_of

WHAT = "files trainer_state.json"
_NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")  # the folder of a checkpoint, and its step
_SUMMARY = "train_runtime"  # of the row at the end, which holds means of the whole run


def find(path: Path) -> list[list[Path]]:
    """Return the last state of each run under a folder, or the file that is named."""
    if path.is_file():
        return [[path]] if path.name == _NAME else []
    runs: dict[Path, list[Path]] = defaultdict(list)
    for file in path.rglob(_NAME):
        inside = file.parent.name.startswith("checkpoint-")
        runs[file.parent.parent if inside and file.parent != path else file.parent].append(file)
    return [[max(files, key=_steps) if len(files) > 1 else files[0]] for _, files in sorted(runs.items())]


def read(files: list[Path]) -> Iterator[tuple[int, str, float]]:
    """Yield (step, name, number) of what was logged."""
    for row in _load(files[0])["log_history"]:
        if _SUMMARY not in row and (step := step_of(row)) is not None:
            for name, number in scalars_of(row):
                yield step, name, number


def _steps(file: Path) -> int:
    """Return how far a state is: the Trainer counts its checkpoints' folders by the step; any other file is read."""
    counted = _CHECKPOINT.fullmatch(file.parent.name)
    return int(counted[1] if counted else _load(file).get("global_step") or 0)


def _load(file: Path) -> dict[str, Any]:
    with damaged_as(f"the state of a Trainer in {file}"):
        state = json.loads(read_bounded(file, LARGEST_TEXT))  # it holds NaN, which orjson refuses
        if not isinstance(state, dict) or not all(isinstance(row, dict) for row in state.get("log_history", [None])):
            raise FormatError(f"{file} has no list `log_history` of what was logged: it is no state of a Trainer")
    return state
