"""Call stacks, captured as pairs of code object and instruction and turned into text only at the end of the step.

Nothing is formatted, and no source line is read, in a hook. A stack is stored as (enclosing stack, own frames): inside a
module call only the few frames below that module's own call are walked. Equal stacks share one number.
"""

from __future__ import annotations

import linecache
import sys
from types import CodeType, FrameType

from trainprobe.compiled import native

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
    "trainprobe/integrations/",
    "trainprobe/watching.py",
    "trainprobe/debugger.py",
)


class Stacks:
    """Interns call stacks; `-1` is the empty stack."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], int] = {}
        self._frames: list[tuple[int, tuple[tuple[CodeType, int], ...]]] = []
        self._text: dict[tuple[CodeType, int], str | None] = {}
        self._lines: list[list[str]] = []
        self.table = native.StackTable(self._frames) if native is not None else None
        if self.table is not None:
            self.capture = self.table.capture

    def capture(self, base: int, stop: int, depth: int = 2) -> int:
        """Return the number of the caller's stack.

        base: number of the enclosing stack, put outermost, once the walk meets the code object whose id is `stop`; where that
        is never met, the walk ends at the outermost frame and base is not used. depth: own frames to leave out.
        """
        frame: FrameType | None = sys._getframe(depth)
        key: list[int] = []
        while frame is not None:
            code = id(frame.f_code)
            if code == stop:
                break
            key.append(code)
            key.append(frame.f_lasti)
            frame = frame.f_back
        key.append(base if frame is not None else -1)
        whole = tuple(key)
        number = self._ids.get(whole)
        return self._intern(whole, depth) if number is None else number

    def _intern(self, key: tuple[int, ...], depth: int) -> int:
        frame: FrameType | None = sys._getframe(depth + 1)
        frames: list[tuple[CodeType, int]] = []
        for _ in range(len(key) // 2):
            assert frame is not None
            frames.append((frame.f_code, frame.f_lasti))  # holding the code object keeps its id from being reused
            frame = frame.f_back
        number = len(self._frames)
        self._frames.append((key[-1], tuple(frames)))
        self._ids[key] = number
        return number

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


def line_number(code: CodeType, instruction: int) -> int:
    """Return the source line of the instruction at byte offset `instruction` (PEP 626)."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
