"""Log-probabilities in files that torch.save wrote, such as slime's `--save-debug-train-data`: read as data, nothing is run.

The columns stand in the dictionary itself, or in one within it (`rollout_data`), as tensors, as lists of one tensor or list a
sequence, or as a list of one dictionary a sequence (`samples`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.engine.compare.number_formats import decode
from trainprobe.engine.core.words import and_more
from trainprobe.engine.storage.safe_files import regular
from trainprobe.errors import FormatError
from trainprobe.rollout.logprobs.columns import MOST, NAMES, Column, gathered, known_names
from trainprobe.rollout.logprobs.tokens import ScoredTokens

SUFFIXES = (".pt", ".pth")
_WITHIN = ("rollout_data", "train_data", "batch", "data", "samples")


def read_torch_file(path: Path) -> ScoredTokens:
    """Return the tokens of a file of torch.save. Raises FormatError for one that cannot be read, and UnsafeFile."""
    regular(path)
    table = _table(torch_archive.load(str(path)))
    columns = {name: _column(value, f"{path}: {name}") for name, value in table.items() if name in known_names()}
    if not columns:
        there = and_more(sorted(str(name) for name in table), shown=12) or "nothing that has a name"
        raise FormatError(f"{path} has no column of log-probabilities: it has {there}")
    return gathered(columns, str(path))


def _table(saved: Any) -> Mapping[Any, Any]:
    """Return name → value of the columns."""
    if isinstance(saved, Mapping) and not saved.keys() & {*NAMES["trainer"], *NAMES["engine"]}:
        saved = next((saved[name] for name in _WITHIN if name in saved), saved)
    if isinstance(saved, Sequence) and saved and all(isinstance(row, Mapping) for row in saved):
        shared = set(saved[0]).intersection(*saved[1:])
        return {name: [row[name] for row in saved] for name in shared if all(row[name] is not None for row in saved)}
    return saved if isinstance(saved, Mapping) else {}


def _column(value: Any, where: str) -> Column:
    """Return one array of a tensor or of a list of numbers, and an array a sequence of a list of tensors or lists."""
    if not isinstance(value, list | tuple) or not any(isinstance(one, list | tuple) or hasattr(one, "load") for one in value):
        return _array(value, where)
    rows = [_array(one, where) for one in value]
    if sum(row.size for row in rows) > MOST * 8:
        raise FormatError(f"{where} has more than {MOST * 8:,} values: split the file")
    return rows


def _array(value: Any, where: str) -> npt.NDArray[Any]:
    if hasattr(value, "load"):
        if np.prod(value.shape, dtype=float) > MOST * 8:
            raise FormatError(f"{where} has more than {MOST * 8:,} values: split the file")
        return decode(value.load(), value.format)
    try:
        array = np.asarray(value)
        if array.dtype.kind == "U":  # slime's versions of weights
            array = array.astype(np.int64)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise FormatError(f"{where} holds {type(value).__name__}, and tensors or lists of numbers are expected")
    return array
