"""Compile the kernels for NVIDIA devices that need not be there (80, 90), for every dtype; say what is in it as JSON lines."""

from __future__ import annotations

import json
import re
import sys

from benchmarks.gpu.sass import compiled
from trainprobe.engine.arrays import triton_jobs, triton_kernels, triton_merge

for capability in map(int, sys.argv[1:]):
    for kind in triton_jobs.KINDS.values():
        whole = triton_jobs.TAKEN
        kernels = [(triton_kernels.reduce_chunks, triton_jobs.chunk_constants(kind, whole))]
        if kind.name in ("float32", "float64", "int64"):
            kernels += [(triton_merge.merge_parts, triton_jobs.merge_constants(kind, flags)) for flags in (1, 2, whole)]
            kernels += [(triton_kernels.reduce_chunks, triton_jobs.chunk_constants(kind, flags)) for flags in (1, 2)]
        for kernel, constants in kernels:
            options = triton_jobs.chunk_options(kind, whole) if "rows" in constants else triton_jobs.OPTIONS
            made = compiled(kernel, constants, options, capability)
            code = made.asm["ptx"]
            squares_are_exact = kind.sort == 0  # so that a fused addition rounds as one that is not
            fused = r"" if squares_are_exact else r"|\bfma\.rn\.f64"
            found = re.findall(r"\.ftz|\.approx|\b(?:atom|red)\." + fused, code)
            print(
                json.dumps({"target": capability, "dtype": kind.name, "bytes": len(made.asm["cubin"]), "found": found}),
                flush=True,
            )
