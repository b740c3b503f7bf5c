"""Puts the rules to each step of one rank: live as a watcher of the probe, offline over a recorded run, by the same code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.records import Finding, Reel
from trainprobe.errors import FormatError
from trainprobe.monitor.frames import Frame, Tracks, frame_of_reel
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import RuleOptions, load_rule

FORMAT = 1


class Watcher:
    """The rules of one rank with what they remember. Call it with each reel, in order."""

    def __init__(self, rules: Mapping[str, RuleOptions]) -> None:
        self.rules = dict(rules)
        self.tracks = Tracks()
        self.memories = {name: Memory() for name in rules}
        self._checks = {name: load_rule(name).check for name in rules}

    def __call__(self, reel: Reel) -> list[Finding]:
        """Judge one collected step and return what the rules found."""
        return self.judge(frame_of_reel(reel, self.tracks))

    def judge(self, frame: Frame) -> list[Finding]:
        """Judge one frame. A step that an error cut short is looked at for non-finite values only."""
        names = self._checks if frame.complete else [name for name in self._checks if name == "nonfinite"]
        found: list[Finding] = []
        for name in names:
            found += self._checks[name](frame, self.memories[name], self.rules[name])
        return found

    def change(self, rules: Mapping[str, RuleOptions]) -> None:
        """Judge by these rules from now on; those that go on judging keep what they remember."""
        self.rules = dict(rules)
        self.memories = {name: self.memories.get(name) or Memory() for name in rules}
        self._checks = {name: load_rule(name).check for name in rules}

    def state(self) -> dict[str, Any]:
        """Return all that the rules remember, as JSON values."""
        return {"format": FORMAT, "rules": {name: memory.to_json() for name, memory in self.memories.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; rules that are not in it begin anew. Raises FormatError when it is no state."""
        if state.get("format") != FORMAT or not isinstance(state.get("rules"), dict):
            raise FormatError(f"this is not a state of the monitor of format {FORMAT}; remove the file to begin anew")
        for name in self.memories.keys() & state["rules"].keys():
            self.memories[name] = Memory.from_json(state["rules"][name])


def save_state(watcher: Watcher, path: Path) -> None:
    """Write the state of a watcher to a file; the file is the old one or the new one at any time."""
    draft = path.with_name(f".{path.name}.partial")
    draft.write_bytes(orjson.dumps(watcher.state()))
    draft.replace(path)


def load_state(watcher: Watcher, path: Path) -> bool:
    """Go on from the state in a file; return whether there was one. Raises FormatError when the file is no state."""
    if not path.exists():
        return False
    try:
        watcher.restore(orjson.loads(path.read_bytes()))
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{path} is not JSON ({error}); remove it to begin anew") from error
    return True


def judge_frames(frames: Iterable[Frame], rules: Mapping[str, RuleOptions]) -> list[Finding]:
    """Judge a recorded run of one or several ranks: frames in any order of ranks, each rank's own in order of steps.

    The frames of one rank share one `Tracks` table.
    """
    watchers: dict[int, Watcher] = {}
    found: list[Finding] = []
    for frame in frames:
        watcher = watchers.setdefault(frame.place.rank, Watcher(rules))
        found += watcher.judge(frame)
    return in_order(found)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings by step, gravity, part of the step and rank: of a NaN that spread over ranks, its origin comes first."""
    weight = {"error": 0, "warning": 1, "info": 2}
    rank = lambda f: f.place.rank if f.place else 0  # noqa: E731
    return sorted(findings, key=lambda f: (f.step if f.step is not None else -1, weight[f.severity], _part(f), rank(f)))


def _part(finding: Finding) -> int:
    """Return 0 for a place in the forward pass, then gradients as they are made, joined and used, then the optimizer."""
    if finding.site is None or finding.rule != "nonfinite":
        return 0
    if finding.site.kind == "scalar":
        return 6
    slot = finding.site.slot.split(".")[0]
    parts = {"grad_output": 1, "grad_input": 1, "grad_unreduced": 2, "grad_unclipped": 3, "grad": 4}
    return parts.get(slot, 5 if slot.endswith("_after") or slot == "update" else 0)
