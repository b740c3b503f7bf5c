"""Builds the optional CPU kernel; everything else about the package stands in pyproject.toml.

The kernel is optional in the strict sense: where there is no compiler the package installs without it, and the same
numbers come from torch's own operations.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("trainprobe/engine/arrays/native")
KERNEL = ("module.c", "rows.c", "kernels.c", "fingerprint.c", "crc32.c", "pool.c")
TAPE = (
    "objects.c",
    "attributes.c",
    "geometry.c",
    "tape.c",
    "seen.c",
    "views.c",
    "looking.c",
    "trees.c",
    "stacks.c",
    "questions.c",
    "ops.c",
    "graph.c",
    "modules.c",
    "edges.c",
    "module_gradients.c",
    "backward_call.c",
    "node_hooks.c",
    "parameter_gradients.c",
    "contribution.c",
    "arena.c",
    "parts.c",
    "registering.c",
    "trail.c",
    "structure.c",
)
FLAGS = [] if sys.platform == "win32" else ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"]

setup(
    ext_modules=[
        Extension(
            "trainprobe._native",
            sources=[str(NATIVE / name) for name in (*KERNEL, *TAPE)],
            depends=[str(NATIVE / name) for name in ("reduce.h", "sweeps.h", "objects.h", "eye.h", "module_watch.h")],
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m", "pthread"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "trainprobe.engine.diff._native",
            sources=["trainprobe/engine/diff/native/difference.c"],
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m"],
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
