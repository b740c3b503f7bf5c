"""Dumps of many calls, written as files: what `dump-compare` is timed with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

OPS = 10  # of a module
STATISTICS = ("Max", "Min", "Mean", "Norm")


def write_large(folder: Path, calls: int, *, differs_from: int = -1, seed: int = 0) -> Path:
    """Write a dump of `calls` calls, modules with ten ops each, with statistics; return the folder.

    differs_from: place of the first call whose results, and those of all behind it, are those of another training; -1 for none.
    """
    at = folder / "step0" / "rank0"
    at.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed).standard_normal((calls + 1, 4)).astype(np.float32).astype(float)
    if differs_from >= 0:
        numbers[differs_from + 1 :] *= 1.01
    numbers[:, 3] = np.abs(numbers[:, 3])
    data, parents, stacks = {}, {}, []
    for i, (name, parent, entry) in enumerate(_entries(calls, numbers.tolist())):
        data[name] = entry
        parents[name] = parent
        if i % 50 == 0:
            stacks.append([[], [f"File model.py, line {i}, in forward, \n return self.block(x)"]])
        stacks[-1][0].append(name)
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (at / "dump.json").write_bytes(orjson.dumps(head, option=orjson.OPT_INDENT_2))
    (at / "construct.json").write_bytes(orjson.dumps(parents))
    (at / "stack.json").write_bytes(orjson.dumps({str(i): stack for i, stack in enumerate(stacks)}))
    return folder


def _entries(calls: int, numbers: list[list[float]]) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """Yield the name, the parent and the content of each call."""
    module = ""
    for i in range(calls):
        first = i % (OPS + 1) == 0
        layer = i // (OPS + 1)
        if first:
            module = f"Module.layers.{layer}.Block.forward.0"
        given, result = _leaf(numbers[i]), _leaf(numbers[i + 1])
        name = module if first else f"Functional.linear.{i}.forward"
        yield name, None if first else module, {"input_args": [given, given], "input_kwargs": {}, "output": [result]}


def _leaf(numbers: list[float]) -> dict[str, Any]:
    about = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 128, 1024]}
    return {**about, **dict(zip(STATISTICS, numbers, strict=True)), "requires_grad": True}
