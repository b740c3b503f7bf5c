"""Compares many ranks and steps at once: one after the other, on the cores of this machine, or on a Ray cluster.

What comes back from another process is what the verdict needs: calls that agree in everything are counted and left behind,
unless all calls are wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainprobe.dump_compare.between_steps import is_step
from trainprobe.dump_compare.judge import Judged, Outcome
from trainprobe.dump_compare.results import Compared
from trainprobe.engine.core.processes import AnyRun, cores, in_turn, on_cores

WORTH_PROCESSES = 64 << 20  # bytes of dump.json files that are worth starting processes for


def suitable(folders: Sequence[Path]) -> AnyRun:
    """Return how to compare what is in these folders of ranks: processes where there are several pairs and much to read."""
    size = sum(path.stat().st_size for folder in folders for path in folder.glob("*.json"))
    return on_cores if len(folders) > 2 and cores() > 1 and size >= WORTH_PROCESSES else in_turn


def without_agreeing(compared: Compared) -> Compared:
    """Return a rank without the calls that agree in everything, which are counted.

    What an optimizer makes is kept: the next step begins with it (see between_steps).
    """
    kept = [judged for judged in compared.calls if _says_something(judged)]
    counts: Counter[Outcome] = Counter(judged.outcome for judged in compared.calls)
    counts.subtract(judged.outcome for judged in kept)
    return replace(compared, calls=kept, agreeing=+counts)


def _says_something(judged: Judged) -> bool:
    agrees = judged.outcome == "identical" and judged.given == 0 and not judged.argument and not is_step(judged)
    return not agrees or any(value.formats for value in judged.values)
