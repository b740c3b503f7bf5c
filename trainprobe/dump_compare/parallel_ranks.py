"""Compares many ranks and steps at once: one after the other, on the cores of this machine, or on a Ray cluster.

What comes back from another process is what the verdict needs: calls that agree in everything are counted and left behind,
unless all calls are wanted.
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.dump_compare.between_steps import is_step
from trainprobe.dump_compare.judge import Judged, Outcome
from trainprobe.dump_compare.results import Compared
from trainprobe.engine.core.processes import AnyRun, cores, in_turn, on_cores
from trainprobe.engine.core.records import Call, Value

WORTH_PROCESSES = 64 << 20  # bytes of dump.json files that are worth starting processes for
_CALL = ("args", "kwargs", "out", "params", "node")


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


def _value(row: int, dtype: str, shape: tuple[int, ...], others: dict[str, Any]) -> Value:
    return Value(row, dtype, shape, **others)


def _take_value_apart(value: Value) -> tuple[Any, ...]:
    names = ("type", "device", "requires_grad", "note", "tensor", "extra")
    return _value, (value.row, value.dtype, value.shape, {name: getattr(value, name) for name in names})


def _call(about: tuple[Any, ...], others: dict[str, Any], content: dict[str, Any]) -> Call:
    call = Call(*about, **others)
    for name, tree in content.items():
        setattr(call, name, tree)
    return call


def _take_call_apart(call: Call) -> tuple[Any, ...]:
    others = {name: getattr(call, name) for name in ("cls", "micro", "parent", "stack")}
    content = {name: tree for name in _CALL if (tree := getattr(call, name)) is not None}
    return _call, ((call.kind, call.name, call.call, call.phase), others, content)


copyreg.pickle(Value, _take_value_apart)  # between processes of our own
copyreg.pickle(Call, _take_call_apart)
