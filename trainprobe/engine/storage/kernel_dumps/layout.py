"""Where the dump files of kernels lie: which folders belong to which step and rank.

    {path}/rank_{rank}/{net}/{graph}/{iteration}/                   MindSpore
    {path}/{time}/{device}/{model}/{model_id}/{iteration}/          CANN, a model
    {path}/[step{N}/]{time}/{device}/                               CANN, single operators
    any folder with dump files in it                                one step of rank 0

A step of MindSpore may run several graphs: their folders for one iteration are read together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from trainprobe.engine.storage.kernel_dumps.file_names import holds_kernels
from trainprobe.errors import FormatError

_RANK = re.compile(r"rank_?(\d{1,9})")
_STEP = re.compile(r"step_?(\d{1,18})")
_TIME = re.compile(r"\d{14,20}")
_DEPTH, _MOST_FOLDERS = 8, 20_000


def find_kernels(path: Path) -> dict[int, dict[int, Path]]:
    """Return step → rank → folder of the kernel dumps under a path. A folder stands for all graphs of its iteration.

    Raises FormatError where there are too many folders.
    """
    found: dict[int, dict[int, Path]] = {}
    for folder in sorted(_folders(path)):
        step, rank = place_of(folder)
        found.setdefault(step, {}).setdefault(rank, folder)
    return {step: dict(sorted(ranks.items())) for step, ranks in sorted(found.items())}


def _folders(path: Path) -> Iterator[Path]:
    """Yield the folders with dump files in them; links are not followed."""
    for looked, (root, folders, _) in enumerate(os.walk(path)):
        here = Path(root)
        if looked == _MOST_FOLDERS:
            raise FormatError(f"{path} has more than {_MOST_FOLDERS} folders: name the dump itself")
        deep = len(here.relative_to(path).parts)
        folders[:] = [name for name in folders if deep < _DEPTH and not name.startswith(".") and name != "constants"]
        if holds_kernels(here):
            yield here


def place_of(folder: Path) -> tuple[int, int]:
    """Return the step and the rank that the names of a folder and of those around it tell; 0 where they tell none."""
    parts = folder.absolute().parts[-_DEPTH:]
    rank = step = None
    for i, part in enumerate(parts):
        if m := _RANK.fullmatch(part):
            rank = int(m[1])
        elif m := _STEP.fullmatch(part):
            step = int(m[1])
        elif _TIME.fullmatch(part) and i + 1 < len(parts) and re.fullmatch(r"\d{1,9}", parts[i + 1]):
            rank = int(parts[i + 1])
    last = parts[-1]
    if step is None and _iterates(folder):
        step = int(last)
    return step or 0, rank or 0


def _iterates(folder: Path) -> bool:
    """Tell whether a folder is one of an iteration: a number below the number of a graph or model."""
    parts = folder.absolute().parts
    return len(parts) > 2 and all(re.fullmatch(r"\d{1,18}", part) for part in parts[-2:]) and not _TIME.fullmatch(parts[-2])


def graphs_of(folder: Path) -> list[Path]:
    """Return the folders of all graphs of the iteration that a folder belongs to, itself among them."""
    if not _iterates(folder):
        return [folder]
    net = folder.absolute().parent.parent
    numbered = sorted(at / folder.name for at in net.iterdir() if re.fullmatch(r"\d{1,18}", at.name) and at.is_dir())
    return [at for at in numbered if at.is_dir() and holds_kernels(at)] or [folder]


def rank_folder(folder: Path) -> Path | None:
    """Return MindSpore's folder of the rank, which holds the graphs next to the dump; None if there is none."""
    return next((at for at in [folder.absolute(), *folder.absolute().parents][:_DEPTH] if _RANK.fullmatch(at.name)), None)
