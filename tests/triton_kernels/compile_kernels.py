"""Compile the kernels for NVIDIA devices that need not be there (80, 90), for every dtype; say what is in it as JSON lines."""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainprobe.engine.arrays import triton_kernels, triton_rows


def compiled(kernel, constants, capability):
    """Return the code of a kernel whose other arguments are int64."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i64" for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=triton_rows.OPTIONS)


for capability in map(int, sys.argv[1:]):
    for kind in triton_rows.KINDS.values():
        whole = triton_rows.TAKEN
        kernels = [(triton_kernels.reduce_chunks, triton_rows.chunk_constants(kind, whole))]
        if kind.name in ("float32", "float64", "int64"):
            kernels += [(triton_kernels.merge_parts, triton_rows.merge_constants(kind, flags)) for flags in (1, 2, whole)]
            kernels += [(triton_kernels.reduce_chunks, triton_rows.chunk_constants(kind, flags)) for flags in (1, 2)]
        for kernel, constants in kernels:
            made = compiled(kernel, constants, capability)
            code = made.asm["ptx"]
            found = re.findall(r"\.ftz|\.approx|\bfma\.rn\.f64|\b(?:atom|red)\.", code)
            print(
                json.dumps({"target": capability, "dtype": kind.name, "bytes": len(made.asm["cubin"]), "found": found}),
                flush=True,
            )
