"""Builds the compiled parts; everything else about the package stands in pyproject.toml.

Where there is no C compiler the package installs without them. It then reads and compares what was recorded elsewhere, and
says what is missing once it is asked to record. With TRAINPROBE_PURE=1 nothing is compiled,
and the wheel is one for every machine.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

NATIVE = Path("trainprobe/engine/arrays/native")
SCHEMA = "trainprobe/engine/core/row_schema.py"
KERNEL = ("module.c", "rows.c", "stats_rows.c", "kernels.c", "fingerprint.c", "pool.c")
TAPE = (
    "modules.c",
    "module_watch.c",
    "ops.c",
    "op_watch.c",
    "tape.c",
    "tape_type.c",
    "tree.c",
    "seen.c",
    "torch.c",
    "records.c",
    "gradients.c",
    "parameter_gradients.c",
    "graph.c",
    "nodes.c",
    "arena.c",
    "journal.c",
)
HEADERS = ("reduce.h", "sweeps.h", "widening.h", "objects.h", "module_watch.h", "op_watch.h", "tape.h")
FLAGS = [] if sys.platform == "win32" else ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"]


# a line that Python runs at its start: see trainprobe/engine/at_start/door.py
DOOR = (
    """import os; os.environ.get("TRAINPROBE") and __import__("trainprobe.engine.at_start.door", fromlist="_").open_door()\n"""
)


class BuildPackage(build_py):
    """Puts the line that opens the environment door beside the package; an editable installation goes without."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "trainprobe.pth").write_text(DOOR)


class BuildParts(build_ext):
    """Builds what can be built, and says what the package does without the rest."""

    def run(self) -> None:
        super().run()
        if not Path(self.get_ext_fullpath("trainprobe._native")).exists():
            self.warn(
                "the compiled part of trainprobe was not built (is there a C compiler?): files can be read and compared, but "
                "no training can be recorded. On Linux x86-64 and aarch64 the wheels bring it."
            )


def row_layout() -> list[tuple[str, str | None]]:
    """Return the flags, the columns of a row and what each is computed with, as engine/core/row_schema.py defines them."""
    tree = ast.parse(Path(SCHEMA).read_text(encoding="utf-8"))
    given = {ast.unparse(node.targets[0]).strip("()"): node.value for node in tree.body if isinstance(node, ast.Assign)}
    names = next(names for names in given if names.startswith("STATS, "))
    flags = zip(names.split(", "), ast.literal_eval(given[names]), strict=True)
    columns = ast.literal_eval(given["PARTIALS"])
    table = given["COMPUTED_WITH"]
    with_flags = dict(zip(map(ast.literal_eval, table.keys), map(ast.unparse, table.values), strict=True))
    return [
        *((name, str(bit)) for name, bit in flags),
        *((f"AT_{name}", str(i)) for i, name in enumerate(columns)),
        ("COLUMNS", str(len(columns))),
        ("COMPUTED_WITH", f"{{{', '.join(with_flags.get(name, 'STATS') for name in columns)}}}"),
    ]


PURE = os.environ.get("TRAINPROBE_PURE") == "1"
EXTENSIONS = (
    []
    if PURE
    else [
        Extension(
            "trainprobe._native",
            sources=[str(NATIVE / name) for name in (*KERNEL, *TAPE)],
            depends=[SCHEMA, *(str(NATIVE / name) for name in HEADERS)],
            define_macros=row_layout(),
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m", "pthread"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "trainprobe.engine.compare._native",
            sources=["trainprobe/engine/compare/native/difference.c"],
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "trainprobe.op_check._native",
            sources=["trainprobe/op_check/native/measure.c"],
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m"],
            py_limited_api=True,
            optional=True,
        ),
    ]
)

setup(
    cmdclass={"build_py": BuildPackage, **({} if PURE else {"build_ext": BuildParts})},
    ext_modules=EXTENSIONS,
    options={} if PURE else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
