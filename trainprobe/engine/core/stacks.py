"""Call stacks, captured as pairs of code object and instruction and turned into text only at the end of the step.

Nothing is formatted, and no source line is read, in a hook. A stack is stored as (enclosing stack, own frames): inside a
module call only the few frames below that module's own call are walked. Equal stacks share one number.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Sequence
from types import CodeType

from trainprobe.engine.core.records import Call

_DEEPEST = 2000  # frames
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
    "trainprobe/run/precision_debugger.py",
)


class Stacks:
    """Interns call stacks; `-1` is the empty stack."""

    def __init__(self) -> None:
        self._frames: list[tuple[int, tuple[tuple[CodeType, int], ...]]] = []
        self._text: dict[tuple[CodeType, int], str | None] = {}
        self._lines: list[list[str]] = []
        self._numbers: dict[tuple[int, ...], int] = {}  # by base, and id and instruction of each code object, which is held

    def capture(self, base: int, stop: int, depth: int = 2) -> int:
        """Return the number of the caller's stack. base: number of the enclosing stack, put outermost.

        stop: id of a code object or a frame, at which the walk ends; where it is never met, the walk ends at the outermost
        frame and base is not used. depth: own frames to leave out, this one included.
        """
        frame = sys._getframe()
        for _ in range(depth):
            frame = frame.f_back
            if frame is None:  # a thread that runs no Python besides
                return -1
        key: list[int] = []
        codes: list[CodeType] = []
        while frame is not None and len(codes) < _DEEPEST:
            code = frame.f_code
            if id(code) == stop or id(frame) == stop:
                break
            codes.append(code)
            key += id(code), frame.f_lasti
            frame = frame.f_back
        else:
            base = -1
        known = (base, *key)
        number = self._numbers.get(known)
        if number is None:
            number = self._numbers[known] = len(self._frames)
            self._frames.append((base, tuple(zip(codes, key[1::2], strict=True))))
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
