"""The line of the user's program at which the call that a finding is about was made, where call stacks were recorded."""

from __future__ import annotations

import re
from dataclasses import replace

from trainprobe.engine.core.records import Finding, StepData

_FRAME = re.compile(r"File (?P<file>.*), line (?P<line>\d+), in (?P<function>.*?), \n (?P<source>.*)", re.S)


def with_line(finding: Finding, step_data: StepData) -> Finding:
    """Return a finding of the rule `nonfinite` whose message ends with the line that made its call; else as it is."""
    line = line_of(finding, step_data) if finding.rule == "nonfinite" else ""
    return replace(finding, message=f"{finding.message}; called at {line}") if line else finding


def line_of(finding: Finding, step_data: StepData) -> str:
    """Return "train.py:21: self.norm(x)", the innermost line that is no part of torch; "" where it is not known."""
    site = finding.site
    if site is None or site.kind not in ("module", "op"):
        return ""
    called = (c for c in step_data.calls if (c.kind, c.name, c.call, c.phase) == (site.kind, site.name, site.call, "forward"))
    stack = next((call.stack for call in called), -1)
    frames = step_data.stacks[stack] if 0 <= stack < len(step_data.stacks) else ()
    own = (frame for frame in map(_FRAME.match, frames) if frame and "/torch/" not in frame["file"])
    first = next(own, None)
    return "" if first is None else f"{first['file']}:{first['line']}: {first['source'].strip()}"
