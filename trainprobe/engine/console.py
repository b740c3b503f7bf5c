"""What a program that reads no findings is told on the console once its probe is closed: that its plan did not come true."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainprobe.engine.records import Finding

_OF_ALL_RANKS = frozenset({"plan"})  # said by rank 0 alone
_OF_THE_TOOL = _OF_ALL_RANKS | {"probe", "kernels"}


def say_what_was_missed(findings: Sequence[Finding], rank: int) -> None:
    """Write each warning about the plan and the probe to standard error, once.

    What the rules of the monitor and the audit find is said by their own actions.
    """
    rules = _OF_THE_TOOL if rank == 0 else _OF_THE_TOOL - _OF_ALL_RANKS
    for message in dict.fromkeys(f.message for f in findings if f.rule in rules and f.severity != "info"):
        sys.stderr.write(f"trainprobe: {message}\n")
