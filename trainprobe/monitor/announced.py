"""What a training announces: a noted setting that changes after it has stood still, such as the stage of a curriculum.

So does an optimizer that takes the place of another: its rate is in other units, as L-BFGS's behind Adam's.

A scalar that is no loss, rate, scale or gradient norm is a setting once it has been the same to the bit at `STANDS` collected
steps in a row. A number that is measured may stand still too, as an accuracy of 1 does, and change because something went
wrong; and a counter changes without a cause. Names of either kind announce nothing.
"""

from __future__ import annotations

import re

from trainprobe.monitor.frames import Frame
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.scalar_names import role_of

STANDS = 16
_FIRST = 1.0  # `optimizer` is only noted once another has taken the place of the first (engine/core/sources.py)
_MEASURED = re.compile(
    r"acc|err|\bf1|score|metric|reward|return|ppl|perplex|entropy|\bkl|norm|mean|std|max|min|time|sec|mem|loss|grad"
    r"|epoch|step|iter|token|sample|count|objectives"
)


def announced(frame: Frame, memory: Memory) -> str:
    """Return what a setting was and is, in words, where one changed at this step; "" otherwise."""
    told, which = "", frame.scalars.get("optimizer", _FIRST)
    if which != memory.numbers.get("optimizer", _FIRST):
        told = "another optimizer took the place of the first"
    memory.numbers["optimizer"] = which
    for name, value in frame.scalars.items():
        if name == "optimizer" or role_of(name) is not None or _MEASURED.search(name.lower()):
            continue
        before, same = memory.numbers.get(f"setting {name}"), memory.numbers.get(f"same {name}", 0.0)
        stood = same >= STANDS  # once it has, it is a setting, and may change at every step
        if before is not None and before == before and value != before and stood:
            told = told or f"`{name}` changed from {before:.6g} to {value:.6g}"
        memory.numbers[f"setting {name}"] = value
        memory.numbers[f"same {name}"] = same if stood else same + 1 if value == before else 0.0
    return told
