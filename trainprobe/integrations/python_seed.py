"""What `seed_all` does under every framework: the seed is checked, and Python and NumPy are seeded."""

from __future__ import annotations

import os
import random

import numpy as np

from trainprobe.errors import UsageError

DROPOUT_STAYS = (
    "seed_all(): dropout stays as it is; in mindstudio-probe 1.3 and 8.1 it was taken out unless "
    "rm_dropout=False was given: seed_all(rm_dropout=True) does that"
)


def seed_python(seed: int) -> None:
    """Seed Python, its child processes, and NumPy. Raises UsageError unless seed is a whole number from 0 to 2^32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"seed_all: {seed!r} is no seed: give a whole number from 0 to {2**32 - 1}")
    os.environ["PYTHONHASHSEED"] = str(seed)  # for processes that are started from now on
    random.seed(seed)
    np.random.seed(seed)
