"""Keeps the last collected steps of one rank, and writes them out when something happens.

It is a sink: steps come on the writer's thread, after the training has gone on. Each goes into a `Ring` at once, so that a
fatal signal, or `kill -9`, loses at most what still waited to be written. A grave finding, or a step that an error cut short,
writes the box out as `black_box.jsonl`; a run that ends well leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.dumps.layout import log_folder
from trainprobe.engine.dumps.record_log import encode
from trainprobe.engine.records import Finding, Reel
from trainprobe.monitor.black_box.plan import GRAVITY, BlackBoxPlan
from trainprobe.monitor.black_box.ring import Ring, read_ring

RING_FILE, BOX_FILE = "black_box.ring", "black_box.jsonl"
Facts = Mapping[str, Any]


class BlackBox:
    """See the module text. tell: says the one sentence that a person needs, with the command."""

    def __init__(self, plan: BlackBoxPlan, output: Path, rank: int) -> None:
        self.plan = plan
        self.folder = log_folder(output, rank)
        self.written: Path | None = None
        self._rank = rank
        self._ring = Ring(self.folder / RING_FILE, plan.steps, plan.max_bytes)
        self._facts: dict[int, Facts] = {}
        self._found: list[Finding] = []
        self._pending: str | None = None

    def remember(self, step: int, facts: Facts) -> None:
        """Keep what belongs to a step beside its reel: batch ids, random state. Called before the reel comes."""
        self._facts[step] = facts

    def write(self, reel: Reel) -> None:
        """Store a step; write the box out when the step asks for it."""
        facts = self._facts.pop(reel.step, {})
        line = encode(reel)
        if not self._ring.put(_piece(facts, line)):
            thin = dataclasses.replace(
                reel, calls=[], values=[], partials=reel.partials[:0], checksums=None, stacks=(), notes=_TOO_LARGE
            )
            self._ring.put(_piece(facts, encode(thin)))
        if self._pending is None and not reel.complete:
            self._pending = f"step {reel.step} ended in an error"
        if self._pending is not None:
            self._write_out(self._pending)
            self._pending = None

    def findings(self, findings: Sequence[Finding]) -> None:
        """Keep findings; a grave one has the box written out when the step that it is about has come."""
        for finding in findings:
            self._found = [*self._found[-99:], finding]
            if self.grave(finding) and self._pending is None and finding.rule not in ("writer", "plan"):
                self._pending = f"{finding.rule} at step {finding.step}"

    def grave(self, finding: Finding) -> bool:
        """Tell whether a finding is reason enough."""
        return GRAVITY[finding.severity] >= GRAVITY[self.plan.severity]

    def interrupted(self, why: str) -> None:
        """An error ended the training: write the box out when the writer ends."""
        self._pending = self._pending or why

    def close(self) -> None:
        """Write the box out if something happened since the last step; after a run that ended well leave nothing behind."""
        if self._pending is not None:
            self._write_out(self._pending)
        self._ring.close()
        self._ring.path.unlink(missing_ok=True)

    def _write_out(self, why: str) -> None:
        path = self.folder / BOX_FILE
        head = {"black_box": 1, "rank": self._rank, "why": why, "findings": [dataclasses.asdict(f) for f in self._found]}
        draft = path.with_name(f".{BOX_FILE}.partial")
        draft.write_bytes(b"\n".join([orjson.dumps(head, default=str), *read_ring(self._ring.path), b""]))
        draft.replace(path)
        if self.written is None:
            sys.stderr.write(f"trainprobe: {why}: the last steps are kept; read them with `trainprobe black-box {path}`\n")
        self.written = path


_TOO_LARGE = ("the numbers of this step's tensors did not fit the black box: raise `max_bytes` or lower `steps`",)


def _piece(facts: Facts, line: bytes) -> bytes:
    return b'{"facts":' + orjson.dumps(facts, default=str) + b',"reel":' + line.rstrip() + b"}"
