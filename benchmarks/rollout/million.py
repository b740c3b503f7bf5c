"""What judging a million tokens costs: CPU seconds and peak memory of the whole command, for each format.

python -m benchmarks.rollout.million
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

ROWS, LONGEST = 1100, 1024
_COMMAND = """
import re, sys, time
from trainprobe.cli import main
main(["rollout-compare", sys.argv[1], "--json", sys.argv[2] + ".json", "--html", sys.argv[2] + ".html"])
print(time.process_time(), int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


def write(folder: Path) -> tuple[list[Path], int]:
    """Write the same tokens in each format; return the files and how many tokens count."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(900, LONGEST + 1, ROWS)
    level = -draw.exponential(0.5, (ROWS, LONGEST)).astype(np.float32)
    wide = {
        "tokens": draw.integers(0, 150_000, (ROWS, LONGEST)),
        "mask": (np.arange(LONGEST) < lengths[:, None]).astype(np.int8),
        "trainer_logprobs": level,
        "engine_logprobs": level + draw.normal(0, 0.02, level.shape).astype(np.float32),
        "entropy": -level,
    }
    rows = {"version": draw.integers(0, 4, ROWS), "micro_batch": np.arange(ROWS) // 8, "rank": np.arange(ROWS) % 8}
    save_file(wide | rows, folder / "it.safetensors")
    np.savez(folder / "it.npz", allow_pickle=False, **wide, **rows)
    lists = {name: [array[i, : lengths[i]].tolist() for i in range(ROWS)] for name, array in wide.items()}
    pq.write_table(pa.table(lists | {name: array.tolist() for name, array in rows.items()}), folder / "it.parquet")
    with (folder / "it.jsonl").open("w") as file:
        for i in range(ROWS):
            file.write(json.dumps({k: v[i] for k, v in lists.items()} | {k: int(v[i]) for k, v in rows.items()}) + "\n")
    return sorted(folder.iterdir()), int(wide["mask"].sum())


def main() -> None:
    """Print a line a format."""
    with tempfile.TemporaryDirectory() as name:
        files, tokens = write(Path(name))
        for file in files:
            command = [sys.executable, "-c", _COMMAND, str(file), f"{name}/answer"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            print(f"{file.suffix}: {tokens:,} tokens, {float(said[-2]):.1f} s CPU, {float(said[-1]):.0f} MB")


if __name__ == "__main__":
    main()
