"""What is printed while a training runs: warnings and errors when they happen, each once, and one line at the end.

Nothing is printed inside a step: a finding is reported when its step has ended.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from trainprobe.engine.core.findings import Cause, cause_of, sentence
from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.records import Finding

PRINTED_PER_RULE = 5  # findings of one rule that are printed; further ones are in the log
_OF_ALL_RANKS = frozenset({"plan"})  # what is the same on every rank: printed by one rank
_PRINTED_THERE = frozenset({"guard", "writer"})  # faults of the tool, which these print themselves


class Console:
    """Prints and logs the findings of one rank. on: False does neither. write_line: prints a line, None to standard error.

    speaks: whether this rank prints what all ranks share. silent: rules whose findings are not printed. markers: a folder
    that the ranks of a run share, in which the first rank that prints an error leaves a mark, so that others do not repeat it.
    """

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.write_line: Callable[[str], object] | None = None
        self.speaks = True
        self.silent: Collection[str] = ()
        self.markers: Path | None = None
        self._printed: set[Cause] = set()
        self._times: Counter[str] = Counter()
        self._pid = os.getpid()

    def report(self, finding: Finding) -> None:
        """Print a warning or an error, the first time that it comes."""
        if not self._is_for_people(finding):
            return
        self._printed.add(cause_of(finding))
        self._times[finding.rule] += 1
        if self._times[finding.rule] > PRINTED_PER_RULE:
            self.line(f"further findings of {finding.rule} are in the run's folder and not printed")
            self.silent = {*self.silent, finding.rule}
        elif self._is_first_rank(finding):
            then = [f"  next: {finding.next}"] if finding.next else []
            text = finding.message if finding.step is None else sentence(finding)
            self.line(text, *then, severity=finding.severity, finding=finding)

    def line(self, *lines: str, severity: str = "info", **fields: Any) -> None:
        """Print and log lines of the tool; nothing in a process that was forked from the training's. See `say`."""
        if self.on and os.getpid() == self._pid:
            say(*lines, severity=severity, write_line=self.write_line, **fields)

    def _is_for_people(self, finding: Finding) -> bool:
        if not self.on or finding.severity == "info" or finding.rule in _PRINTED_THERE or finding.rule in self.silent:
            return False
        return (self.speaks or finding.rule not in _OF_ALL_RANKS) and cause_of(finding) not in self._printed

    def _is_first_rank(self, finding: Finding) -> bool:
        """Return whether no other rank has printed this finding; True where that cannot be known."""
        if self.markers is None:
            return True
        key = repr((finding.step, cause_of(finding))).encode()
        try:
            self.markers.mkdir(parents=True, exist_ok=True)
            name = self.markers / hashlib.sha256(key).hexdigest()[:16]
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True
