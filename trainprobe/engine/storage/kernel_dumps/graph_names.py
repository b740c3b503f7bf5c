"""Which module launched a kernel, and on which line of the program: from the scope in its name and from MindSpore's graphs.

A whole name is a path of cells, each `name-Class`, with the kernel at its end:
`Gradients/Default/network-WithLossCell/_backbone-Net/head-Dense/Grad_MatMul/MatMul-op3`. File names have `_` in place of `/`;
`execution_order/*.csv` and the text of `graphs/*.ir`, which MindSpore writes next to its dump, hold the original names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainprobe.engine.core.records import Call, Phase
from trainprobe.engine.storage.kernel_dumps.file_names import read_rows
from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError

_WRAPPERS = frozenset({"network", "_backbone", "backbone"})  # cells of MindSpore around the model
_ROOTS = frozenset({"Default", "Gradients"})
_LARGEST_IR, _MOST_FILES, _MOST_LINES = 256 << 20, 256, 64
_FULL_NAME = re.compile(r"\s*# Fullname with scope: \((.{1,4096})\)\s*")
_OLD_FULL_NAME = re.compile(r"\s*: full_name_with_scope: \((.{1,4096})\)\s*")
_PARAMETER = re.compile(r"%para\d+_([^:\s]{1,1024}): .*")
_LINE = re.compile(r"\s*# In file (.+?):(\d+)(?:~\d+)?, [\d~]+/(.*)/\s*")


@dataclass(slots=True)
class GraphNames:
    """What the graphs next to a dump say. Flat names are those of files.

    order: whole name of a kernel → its place in the order of execution. whole: flat name of a kernel → its whole name.
    parameters: flat name → name. lines: whole name of a kernel → lines of the program, outermost first.
    """

    order: dict[str, int] = field(default_factory=dict[str, int])
    whole: dict[str, str] = field(default_factory=dict[str, str])
    parameters: dict[str, str] = field(default_factory=dict[str, str])
    lines: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, name: str) -> None:
        """Remember a whole name under all names that a file may give it."""
        flat = flatten(name)
        self.whole.setdefault(flat, name)
        self.whole.setdefault(flat.rpartition("/")[2], name)
        self.whole.setdefault(name.rpartition("/")[2], name)


def flatten(name: str) -> str:
    """Return a name as files have it."""
    return re.sub(r"[./\\ ]", "_", name)


def read_graph_names(rank: Path | None) -> GraphNames:
    """Read the graphs that MindSpore wrote next to the dump of a rank. What cannot be read yields no names."""
    names = GraphNames()
    if rank is None:
        return names
    for path in sorted((rank / "execution_order").glob("ms_execution_order_graph_*.csv"))[:_MOST_FILES]:
        for row in read_rows(path)[1:]:
            if row and "/" in row[0]:
                names.add(row[0].strip())
                names.order.setdefault(row[0].strip(), len(names.order))
    for path in sorted((rank / "graphs").glob("*.ir"))[:_MOST_FILES]:
        _read_ir(path, names)
    return names


def _read_ir(path: Path, names: GraphNames) -> None:
    try:
        text = read_bounded(path, _LARGEST_IR, follow=True).decode("utf-8", "replace")
    except (OSError, FormatError):
        return
    lines: list[str] | None = None
    for line in text.splitlines(keepends=True):
        if m := _FULL_NAME.fullmatch(line) or _OLD_FULL_NAME.fullmatch(line):
            names.add(m[1])
            lines = names.lines.setdefault(m[1], [])
        elif lines is not None and (m := _LINE.fullmatch(line)) and len(lines) < _MOST_LINES:
            lines.append(f"File {m[1]}, line {m[2]}, \n {m[3].strip()}")
        elif m := _PARAMETER.fullmatch(line.rstrip()):
            names.parameters.setdefault(flatten(m[1]), m[1])
        elif lines is not None and not line.lstrip().startswith("#"):
            lines = None


def frames_of(lines: list[str]) -> list[str]:
    """Return the lines of the program, innermost first, those of the framework's own files last."""
    own = [line for line in reversed(lines) if "-packages/mindspore/" not in line.partition(", line")[0]]
    return own + [line for line in reversed(lines) if line not in own]


def module_of(whole: str, known: dict[tuple[Phase, str], Call]) -> Call | str | None:
    """Return the module that launched a kernel, "optimizer", or None where the name tells none.

    known: the modules so far, by phase and path; a new one is added to it, behind those around it.
    """
    cells = list(_cells(whole))
    if not cells:
        return None
    if cells[0][0] == "optimizer":
        return "optimizer"
    parent: Call | None = None
    path = ""
    phase: Phase = "backward" if is_gradient(whole) else "forward"
    for name, cls in cells:
        path = f"{path}.{name}" if path else name
        if (phase, path) not in known:
            known[phase, path] = Call("module", path, 0, phase, cls=cls, parent=parent)
        parent = known[phase, path]
    return parent


def is_gradient(whole: str) -> bool:
    """Tell whether a kernel belongs to the backward pass."""
    return whole.startswith("Gradients/")


def _cells(whole: str) -> Iterator[tuple[str, str]]:
    """Yield (name, class) of each cell around a kernel, without those of MindSpore around the model."""
    outside = True
    for part in whole.split("/")[:-1][:_MOST_LINES]:
        name, _, cls = part.removeprefix("recompute_").partition("-")
        if not cls or not name or name in _ROOTS or (outside and name in _WRAPPERS):
            continue
        outside = False
        yield name, cls
