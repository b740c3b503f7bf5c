"""Keeps the last collected steps of one rank, and writes them out when something happens.

Each step goes into a `Ring` before the next one begins, on the training's own thread (about a millisecond for 1,600 values):
whatever ends the process then, be it `kill -9` or a fault in C, the last steps are in the file, and with them the `Position`
in the step in progress and its `StepJournal`: what that step has brought so far. `LastWords` adds the stacks at a fatal signal.
A severe finding, or an error, writes the box out as `black_box.jsonl`; a run that ends well leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.position import Position
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.storage.dumps.header import place_text
from trainprobe.engine.storage.dumps.layout import log_folder
from trainprobe.engine.storage.dumps.record_log import encode
from trainprobe.engine.storage.step_journal import StepJournal
from trainprobe.monitor.black_box.last_words import FAULT_FILE, TERMINATED_FILE, LastWords
from trainprobe.monitor.black_box.plan import BlackBoxPlan
from trainprobe.monitor.black_box.ring import Ring, read_ring
from trainprobe.monitor.black_box.step_in_progress import step_in_progress
from trainprobe.monitor.rules import GRAVITY

RING_FILE, BOX_FILE = "black_box.ring", "black_box.jsonl"
BEFORE_FOLDER = "black_box_before"  # of a run that died in the same place
Facts = Mapping[str, Any]


LAG = 5  # so many steps may have come when the writer's thread gets to a finding


class BlackBox:
    """See the module text. A sink too: the writer's thread tells it findings, and when all of a step is written.

    position: of this process. about: what its steps have in common beside
    the place (see `engine.storage.step_journal.read_journal`).
    """

    def __init__(
        self,
        plan: BlackBoxPlan,
        output: Path,
        place: Place,
        position: Position | None = None,
        about: Facts | None = None,
    ) -> None:
        self.plan = plan
        self.position = position or Position()
        self.folder = log_folder(output, place.rank)
        self.written: Path | None = None
        self._rank = place.rank
        _set_aside(self.folder)
        self._ring = Ring(self.folder / RING_FILE, plan.steps + LAG, plan.max_bytes)
        self.position.keep_in(self._ring.room_for_position())
        self._journal = StepJournal(self._ring.room_for_journal())
        self._about = orjson.dumps({"place": place_text(place), **(about or {})})
        self._words = LastWords(self.folder)
        _open.add(self)
        self._followed = -1  # the step that the journal is about
        self._where = ""  # the position when something happened
        self._earlier = last_error()
        self._found: list[Finding] = []
        self._pending: str | None = None  # why the box is to be written out with the next step that comes
        self._ended: str | None = None  # why it is when the writer ends
        self._left = False
        if place.rank == 0:
            say(
                f"the last {plan.steps} collected steps of each rank are kept; if the run dies, read them with "
                f"`trainprobe black-box {output}`"
            )

    def follow(self, step: int) -> StepJournal:
        """Return the journal of a step that begins; its entries are in the file as they come."""
        self._followed = step
        self._journal.begin(step, self._about)
        return self._journal

    def unfollow(self) -> None:
        """Forget what the step in progress has brought."""
        self._journal.end()

    def hold(self, step_data: StepData, facts: Facts) -> None:
        """Store a step with what its data do not hold: batch ids, random state. It is in the file when this returns."""
        if self._left:
            return
        if not step_data.complete:
            self._where = str(self.position.where())
        line = encode(step_data)
        if not self._ring.put(_piece(facts, line)):
            thin = dataclasses.replace(
                step_data, calls=[], values=[], partials=step_data.partials[:0], checksums=None, stacks=(), notes=_TOO_LARGE
            )
            self._ring.put(_piece(facts, encode(thin)))
        if step_data.step == self._followed:
            self._journal.end()  # not where the next step is in progress, because the numbers of this one came late

    def write(self, step_data: StepData) -> None:
        """Write the box out when something about this step asks for it."""
        if self._pending is None and not step_data.complete:
            self._pending = f"step {step_data.step} ended in an error"
        if self._pending is not None:
            self._write_out(self._pending, step_data.step)
            self._pending = None

    def findings(self, findings: Sequence[Finding]) -> None:
        """Keep findings; a severe one has the box written out when the step that it is about has come."""
        for finding in findings:
            self._found = [*self._found[-99:], finding]
            if self.severe(finding) and self._pending is None and finding.rule not in ("writer", "plan"):
                self._pending = f"{finding.rule} at step {finding.step}"

    def severe(self, finding: Finding) -> bool:
        """Tell whether a finding is reason enough."""
        return GRAVITY[finding.severity] >= GRAVITY[self.plan.severity]

    def interrupted(self, why: str) -> None:
        """An error ended the training: write the box out when the writer ends."""
        self._ended = self._ended or why

    def close(self) -> None:
        """Write the box out if something happened since the last step; after a run that ended well leave nothing behind."""
        self._words.close()
        error = last_error()
        if error is not None and error is not self._earlier:
            self.interrupted(f"{type(error).__name__} ended the program")
        why = self._ended or self._pending
        if why is not None:
            self._write_out(why)
        self.leave()
        self._ring.close()
        self._ring.path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Write no more into the file; safe to call twice."""
        _open.discard(self)
        self._left = True
        self.position.keep_in(None)
        self._journal.close()

    def _write_out(self, why: str, upto: int | None = None) -> None:
        path = self.folder / BOX_FILE
        pieces = read_ring(self._ring.path)
        last = step_in_progress(self._ring.path) if upto is None else None
        if last is not None:  # the program ended within it
            self._where = str(self.position.where())
            pieces.append(orjson.dumps(last))
        findings = [dataclasses.asdict(finding) for finding in self._found]
        head = {"black_box": 1, "rank": self._rank, "why": why, "where": self._where, "findings": findings}
        draft = path.with_name(f".{BOX_FILE}.partial")
        if upto is not None:  # the training may have gone on meanwhile
            pieces = [piece for piece in pieces if orjson.loads(piece)["reel"]["step"] <= upto]
        draft.write_bytes(b"\n".join([orjson.dumps(head, default=str), *pieces[-self.plan.steps :], b""]))
        draft.replace(path)
        if self.written is None:
            say(f"{why}: the last steps are kept; read them with `trainprobe black-box {path}`", severity="warning")
        self.written = path


_TOO_LARGE = ("the numbers of this step's tensors did not fit the black box: raise `max_bytes` or lower `steps`",)


_open: weakref.WeakSet[BlackBox] = weakref.WeakSet()


def _after_fork() -> None:
    """Leave the files to the parent: what a child does is no word about it."""
    for box in list(_open):
        box.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _set_aside(folder: Path) -> None:
    """Move what a run that was killed left here out of the way of the run that follows it."""
    left = [path for path in map(folder.joinpath, (RING_FILE, BOX_FILE, FAULT_FILE, TERMINATED_FILE)) if path.exists()]
    if left:
        (folder / BEFORE_FOLDER).mkdir(exist_ok=True)
    for path in left:
        path.replace(folder / BEFORE_FOLDER / path.name)


def last_error() -> BaseException | None:
    """Return the error that reached the top of the program and was printed, if one did."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _piece(facts: Facts, line: bytes) -> bytes:
    return b'{"facts":' + orjson.dumps(facts, default=str) + b',"reel":' + line.rstrip() + b"}"
