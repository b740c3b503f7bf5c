"""How fast two checkpoints are compared, beside reading the same files with `cat`, and how much memory it takes.

    python -m benchmarks.ckpt_compare [--gigabytes 2] [--folder DIR] [--msprobe SITE_PACKAGES]

Every figure is a ratio measured in the same minute on the same machine, warm page cache, best of three. `--msprobe` names the
site-packages of an environment with mindstudio-probe: then its comparison and ours read the same two Megatron folders.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainprobe.ckpt_compare.compare import compare
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.engine.compare import measure, number_format

ROWS, COLUMNS = 4096, 4096


def best(work: Callable[[], object], repeats: int = 3) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def write(path: Path, tensors: int, change: float) -> None:
    """Write a safetensors file of fp32 matrices; `change` is added to every element."""
    size = 4 * ROWS * COLUMNS
    header = {
        f"layers.{i}.w": {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(tensors):
            rng = np.random.default_rng(i)
            (rng.standard_normal((ROWS, COLUMNS), dtype=np.float32) + np.float32(change)).tofile(file)


def one_core() -> None:
    """Throughput of the measuring alone, one thread, both sides counted."""
    n = 1 << 25
    a = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    half = (a.view(np.uint32) >> 16).astype(np.uint16)
    f32, bf16 = number_format("float32"), number_format("bfloat16")
    cases = {
        "fp32, identical": (a, a.copy(), f32, f32),
        "fp32, every element differs": (a, a + np.float32(1e-4), f32, f32),
        "bf16, identical": (half, half.copy(), bf16, bf16),
        "bf16, every element differs": (half, half ^ np.uint16(1), bf16, bf16),
        "fp32 against bf16": (a, half, f32, bf16),
    }
    for name, (x, y, fx, fy) in cases.items():
        seconds = best(lambda x=x, y=y, fx=fx, fy=fy: measure(x, y, fx, fy))
        print(f"  {name:32s} {(x.nbytes + y.nbytes) / seconds / 1e9:6.2f} GB/s")


def whole_files(folder: Path, gigabytes: float) -> None:
    """Throughput of comparing files with all cores, against reading both with `cat`."""
    tensors = max(1, round(gigabytes * 1e9 / (4 * ROWS * COLUMNS)))
    paths = {name: folder / f"{name}.safetensors" for name in ("a", "same", "other")}
    for name, change in (("a", 0.0), ("same", 0.0), ("other", 1e-4)):
        write(paths[name], tensors, change)
    for other in ("same", "other"):
        pair = [paths["a"], paths[other]]
        total = sum(p.stat().st_size for p in pair)
        cat = best(lambda pair=pair: subprocess.run(["cat", *map(str, pair)], stdout=subprocess.DEVNULL, check=True))
        ours = best(lambda pair=pair: compare(*map(open_checkpoint, pair)))
        rates = f"cat {total / cat / 1e9:.2f} GB/s, compare {total / ours / 1e9:.2f} GB/s, ratio {cat / ours:.2f}"
        print(f"  {other:6s} {total / 1e9:.1f} GB: {rates}")
    print(f"  resident memory at most {memory(paths['a'], paths['other'])} MiB for {total / 1e9:.1f} GB")


def memory(a: Path, b: Path) -> int:
    """Peak resident memory of a fresh process that compares the two, MiB."""
    script = (
        "from pathlib import Path\nfrom trainprobe.cli import main\n"
        f"main(['ckpt-compare', '-q', {str(a)!r}, {str(b)!r}])\n"
        # not ru_maxrss, which a process inherits from its parent
        "print(int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) // 1024)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[-1])


MSPROBE = """
import sys
sys.path += [{site!r}, {stub!r}]
import runpy
sys.argv = ["msprobe", "config_check", "-c", {a!r}, {b!r}, "-o", {out!r}]
try:
    runpy.run_module("msprobe.msprobe", run_name="__main__")
except SystemExit as end:
    print("exit", end.code or 0)
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) // 1024)
"""


def beside_msprobe(folder: Path, site: str, gigabytes: float) -> None:
    """Time both tools on two legacy Megatron folders of fp32 matrices that differ by rounding-sized noise."""
    import torch

    (folder / "stub" / "megatron").mkdir(parents=True)  # what msprobe wants to see before it reads a Megatron folder
    (folder / "stub" / "megatron" / "__init__.py").touch()
    count = max(1, round(gigabytes * 1e9 / (4 * ROWS * COLUMNS)))
    paths = {name: folder / name for name in ("a", "b")}
    for name, change in (("a", 0.0), ("b", 1e-4)):
        rank = paths[name] / "iter_0000001" / "mp_rank_00"
        rank.mkdir(parents=True)
        names = [f"decoder.layers.{i}.self_attention.linear_proj.weight" for i in range(count)]
        model = {
            n: torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(i)) + change for i, n in enumerate(names)
        }
        sizes = {f"{axis}_model_parallel_size": 1 for axis in ("tensor", "pipeline", "expert")}
        args = argparse.Namespace(**sizes, num_layers=count, num_experts=None, virtual_pipeline_model_parallel_size=None)
        torch.save({"args": args, "model": model, "iteration": 1, "checkpoint_version": 3.0}, rank / "model_optim_rng.pt")
        (paths[name] / "latest_checkpointed_iteration.txt").write_text("1")
    a, b = (str(p) for p in paths.values())
    script = MSPROBE.format(site=site, stub=str(folder / "stub"), a=a, b=b, out=str(folder / "similarity.json"))
    start = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    theirs = time.perf_counter() - start
    written = (folder / "similarity.json").is_file()
    print(f"  msprobe    {theirs:6.2f} s, {ran.stdout.split()[-1]} MiB, result written: {written}, {_exit_line(ran.stdout)}")
    start = time.perf_counter()
    peak = memory(paths["a"], paths["b"])
    print(f"  trainprobe {time.perf_counter() - start:6.2f} s, {peak} MiB")


def _exit_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("exit")), "exit 0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of one file")
    parser.add_argument("--folder", default=None, help="where to write the files")
    parser.add_argument("--msprobe", default=None, help="site-packages with mindstudio-probe, to measure it as well")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, NumPy {np.__version__}, page size {resource.getpagesize()}")
    print("one thread, in memory, both sides counted:")
    one_core()
    print("files, all cores, warm cache:")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        whole_files(Path(folder), options.gigabytes)
    if options.msprobe is not None:
        print("two legacy Megatron folders, each tool in a process of its own:")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            beside_msprobe(Path(folder), options.msprobe, options.gigabytes)


if __name__ == "__main__":
    main()
