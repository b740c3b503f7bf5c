"""What the machine code of the sweeps allows: instructions an element in the loop over whole tiles, and the rate that bounds.

    python -m benchmarks.gpu.sass

needs Triton (`.venvs/triton`), which compiles for a GPU that is not there and carries NVIDIA's disassembler. A bound is no
measurement: memory, the start of a program and its last reductions come on top.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainprobe.engine.arrays import triton_kernels, triton_rows
from trainprobe.engine.stats.partials import CHECKSUM, STATS, STD

SMS, CLOCK = 132, 1.755e9  # an H100 or H200
# lanes a clock and multiprocessor, of compute capability 9.0 (CUDA C++ Programming Guide, "Arithmetic Instructions")
PIPES = {
    "wide conversion": (16, ("F2F.F64", "F2F.F32.F64", "I2F.F64", "F2I", "MUFU")),
    "float64": (64, ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX")),
    "integer multiply": (64, ("IMAD.WIDE", "IMAD.HI", "IMAD R", "IMAD.U32", "IMAD.X")),
    "issue": (128, ("",)),
}
WANTED = {"stats": STATS, "checksum": CHECKSUM, "both": STATS | CHECKSUM, "std": STATS | STD}
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([^;/]*);")


def compiled(kernel: Any, constants: dict[str, Any], options: dict[str, Any], capability: int = 90) -> Any:
    """Return what Triton compiles of a kernel whose other arguments are int64."""
    names = kernel.arg_names
    assert names[-len(constants) :] == [*constants], names  # triton_rows launches with the constants in this order
    signature = {name: "constexpr" if name in constants else "i64" for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def machine_code(made: Any) -> list[tuple[int, str]]:
    """Return (address, instruction) of a compiled kernel."""
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([tools / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), word.strip()) for at, word in _LINE.findall(text)]


def loops(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Yield the instructions that each loop runs for a contiguous tensor, from the target of a branch backwards to the branch.

    What is jumped over are the divisions that find the places of a strided one.
    """
    targets = {at: int(jump[1], 16) for at, word in code if (jump := re.match(r"BRA(?:\.\S+)? .*?0x([0-9a-f]+)", word))}
    for end, begin in targets.items():
        if begin >= end:
            continue
        body = [(at, word) for at, word in code if begin <= at <= end]
        taken: list[str] = []
        until = begin
        for at, word in body:
            if at < until:
                continue
            taken.append(word)
            target = targets.get(at, 0)
            if at < target <= end and any(w.startswith("I2F.U32.RP") for a, w in body if at < a < target):
                until = target
        yield taken


def fast_loops(made: Any) -> list[list[str]]:
    """Return the loops whose loads take 16 bytes a thread."""
    return [loop for loop in loops(machine_code(made)) if any(word.startswith("LDG.E.128") for word in loop)]


def figures(kind: triton_rows.KernelKind, flags: int) -> tuple[float, str, float]:
    """Return instructions an element, the busiest pipe, and the rate in GB/s that it allows."""
    constants, options = triton_rows.chunk_constants(kind, flags), triton_rows.chunk_options(kind, flags)
    clocks = Counter[str]()
    for loop in fast_loops(compiled(triton_kernels.reduce_chunks, constants, options)):
        elements = 16 // kind.size * sum(word.startswith("LDG.E.128") for word in loop)
        for name, (lanes, starts) in PIPES.items():
            clocks[name] += sum(word.startswith(starts) for word in loop) / elements / lanes  # pyright: ignore[reportArgumentType]
    busiest, most = max(clocks.items(), key=lambda item: item[1])
    return clocks["issue"] * PIPES["issue"][0], busiest, kind.size * SMS * CLOCK / most / 1e9


if __name__ == "__main__":
    print(f"| dtype | {' | '.join(WANTED)} |\n|---|{'---|' * len(WANTED)}")
    for dtype in DTYPES:
        kind = next(kind for kind in triton_rows.KINDS.values() if kind.name == dtype)
        found = [figures(kind, flags) for flags in WANTED.values()]
        print(
            f"| {dtype} | {' | '.join(f'{count:.1f}, {pipe}: {rate:,.0f} GB/s' for count, pipe, rate in found)} |", flush=True
        )
