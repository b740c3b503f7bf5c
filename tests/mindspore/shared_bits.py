"""The same bits for MindSpore and for PyTorch, and what PyTorch's library makes of them (`torch_numbers.json`).

The numbers are made anew by `python -m tests.mindspore.shared_bits` in the environment that holds PyTorch;
tests/engine/arrays/test_numpy_rows.py holds that they are still what PyTorch's library gives.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

NUMBERS = Path(__file__).with_name("torch_numbers.json")
SHAPE = (5, 13)
WORDS = {  # name → whole number of the same size, with a sign where PyTorch has none without
    **{"bfloat16": "i2", "float16": "i2", "float32": "i4", "float64": "i8"},
    **{"int32": "i4", "int64": "i8", "uint8": "u1", "bool": "u1"},
}


def bits(name: str) -> np.ndarray:
    """Return elements of a dtype as whole numbers of its size: ordinary ones, and of floats each kind of odd one."""
    draw = np.random.default_rng(len(name))
    x = draw.standard_normal(SHAPE) * 3
    if name == "bool":
        return (x > 0).astype("u1")
    if not name.startswith(("float", "bfloat")):
        info = np.iinfo(name)
        return draw.integers(info.min, info.max, SHAPE, dtype=name)
    x[0, :5] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    if name == "bfloat16":
        return (x.astype(np.float32).view("u4") >> 16).astype("u2").view("i2")
    x = x.astype(name)
    x[1, 0] = np.finfo(name).smallest_subnormal
    return x.view(WORDS[name])


def torch_numbers(name: str) -> dict[str, object]:
    """Return checksum, CRC and partials that PyTorch's library makes of these bits."""
    import torch

    from trainprobe.engine.arrays.torch_arrays import CHECKSUM, CRC32, STATS, STD, SUBNORMAL, TorchStatsRows

    t = torch.from_numpy(bits(name))
    stats_rows = TorchStatsRows(STATS | CHECKSUM | STD | CRC32 | SUBNORMAL)
    stats_rows.add(t.view(getattr(torch, name)))
    rows, sums, crcs = stats_rows.drain()
    assert sums is not None and crcs is not None
    return {"checksum": f"{int(sums[0]):016x}", "crc32": int(crcs[0]), "partials": [x.hex() for x in rows[0].tolist()]}


if __name__ == "__main__":
    NUMBERS.write_text(json.dumps({name: torch_numbers(name) for name in WORDS}, indent=1) + "\n")
