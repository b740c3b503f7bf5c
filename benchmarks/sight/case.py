"""What a case of the bench states, and when a finding answers it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STEPS = 80
CLASSES = {
    1: "co-replication",
    2: "followers",
    3: "constant or varying where it should not be",
    4: "normalised apart",
    5: "sum of the parts",
    6: "gradient by position",
    7: "target in the input",
    8: "structure of the data against the call",
    9: "against the trivial answer",
    10: "ratios between parameter groups",
    11: "gradient lost over an exchange",
    12: "numbers that a type cannot hold",
    13: "data position",
    14: "dependence",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A silent bug: `program(name)` trains with it, `program("")` is the healthy twin and differs by that switch only.

    number: its class, 1 to 14. place: a regular expression for the whole name of the first finding's site; `site` of a finding
    names a parameter, module, input, scalar or rank. cause: one to be found in the rule's name or the message, in lower case.
    accept: what a person would accept as the first finding. source: the public thread that reports it, empty for others.
    by: the step by which it must be found. ranks: gloo processes. experiment: why watching alone cannot see it, where so.
    """

    name: str
    number: int
    program: Callable[[str], None]
    place: str
    cause: str
    accept: str
    source: str = ""
    by: int = STEPS
    ranks: int = 1
    experiment: str = ""

    def in_kind(self, finding: dict[str, Any]) -> bool:
        """Whether a finding tells of such a fault, be it at another place."""
        return re.search(self.cause, f"{finding['rule']}: {finding['message']}".lower()) is not None

    def at_its_place(self, finding: dict[str, Any]) -> bool:
        """Whether a finding names the place too."""
        site = finding["site"]
        return re.fullmatch(self.place, site["name"] if site else "") is not None
