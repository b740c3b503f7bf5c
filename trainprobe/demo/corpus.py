"""Real text that is on every machine: the source of Python's standard library, documentation strings included."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainprobe.errors import FormatError


def read_corpus(limit: int = 4_000_000) -> npt.NDArray[np.uint8]:
    """Return the first `limit` bytes of the standard library's top-level modules in name order, uint8 [n].

    The same bytes on every machine with the same Python release. Raises FormatError when this Python was installed
    without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        if size >= limit:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if size < 100_000:
        raise FormatError(
            f"only {size} bytes of Python source in {folder}, too little to train on: "
            "use a Python that was installed with its standard library as files"
        )
    return np.frombuffer(b"".join(parts)[:limit], dtype=np.uint8)


def draw_batch(
    corpus: npt.NDArray[np.uint8], step: int, batch: int, length: int, seed: int = 0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return inputs and next-byte targets of one step, both int64 [batch, length]; a pure function of (seed, step)."""
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, corpus.size - length - 1, size=batch)
    rows = corpus[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return rows[:, :-1].copy(), rows[:, 1:].copy()
