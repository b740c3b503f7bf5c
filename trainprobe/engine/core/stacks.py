"""Call stacks, captured as pairs of code object and instruction and turned into text only at the end of the step.

Nothing is formatted, and no source line is read, in a hook. A stack is stored as (enclosing stack, own frames): inside a
module call only the few frames below that module's own call are walked. Equal stacks share one number.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

from trainprobe.compiled import recording
from trainprobe.engine.core.records import Call

_HIDDEN = (
    "torch/overrides.py",
    "torch/utils/_contextlib.py",
    "mindspore/nn/cell.py",
    "mindspore/utils/ms_dispatch.py",
    "mindspore/ops/auto_generate/",
    "mindspore/ops/primitive.py",
    "mindspore/graph/api.py",
    "mindspore/common/api.py",
    "trainprobe/engine/",
    "trainprobe/monitor/audit/",
    "trainprobe/integrations/",
    "trainprobe/run/probe.py",
    "trainprobe/watching.py",
    "trainprobe/debugger.py",
)


class Stacks:
    """Interns call stacks; `-1` is the empty stack.

    capture(base, stop, depth=2) returns the number of the caller's stack. base: number of the enclosing stack, put outermost,
    once the walk meets the code object whose id is `stop`; where that is never met, the walk ends at the outermost frame and
    base is not used. depth: own frames to leave out.
    """

    def __init__(self) -> None:
        self._frames: list[tuple[int, tuple[tuple[CodeType, int], ...]]] = []
        self._text: dict[tuple[CodeType, int], str | None] = {}
        self._lines: list[list[str]] = []
        self.table: Any = recording.StackTable(self._frames)
        self.capture: Callable[..., int] = self.table.capture

    def text(self) -> list[list[str]]:
        """Return every stack so far, innermost line first, `File P, line L, in F, \\n SOURCE`; new ones are made once."""
        for base, frames in self._frames[len(self._lines) :]:
            own = [line for line in map(self._line, frames) if line is not None]
            self._lines.append(own + (self._lines[base] if base >= 0 else []))
        return list(self._lines)

    def _line(self, where: tuple[CodeType, int]) -> str | None:
        if where not in self._text:
            code, instruction = where
            name = code.co_filename
            if any(hidden in name for hidden in _HIDDEN):
                self._text[where] = None
            else:
                line = line_number(code, instruction)
                source = linecache.getline(name, line).strip()
                function = getattr(code, "co_qualname", code.co_name)
                self._text[where] = f"File {name}, line {line}, in {function}, \n {source}"
        return self._text[where]


def used_by(calls: Iterable[Call], stacks: Sequence[list[str]]) -> list[list[str]]:
    """Return the stacks of some calls, each once, and give the calls their numbers among these.

    So steps that differ in nothing have one layout, whatever a step before them has recorded.
    """
    having = [call for call in calls if call.stack >= 0] if stacks else []
    numbers = {number: i for i, number in enumerate(sorted({call.stack for call in having}))}
    for call in having:
        call.stack = numbers[call.stack]
    return [stacks[number] for number in numbers]


def line_number(code: CodeType, instruction: int) -> int:
    """Return the source line of the instruction at byte offset `instruction` (PEP 626)."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
