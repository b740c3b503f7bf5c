"""Puts the rules to each step of one rank: live as a watcher of the probe, offline over a recorded run, by the same code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.core.findings import Count, counted_all, recount
from trainprobe.engine.core.guard import Part, simply
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded, set_aside, write_whole
from trainprobe.errors import FormatError
from trainprobe.monitor.findings import in_order
from trainprobe.monitor.frames import Frame, SeriesTable, frame_of_step
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import GRAVITY, RuleOptions, load_rule
from trainprobe.monitor.rules.nonfinite import wants_forward
from trainprobe.monitor.scalar_names import scalar
from trainprobe.monitor.updates_seen import UpdatesSeen, no_update, steps_without_update

FORMAT = 1
_STEPS = "collected steps"  # in the memory of each rule
OF_THE_LOSS = frozenset({"blow_up", "drift", "plateau", "spike"})  # rules that judge it
NO_LOSS = 'Not judged: the loss, which no step recorded (`probe.note("loss", loss)` records it).'
FAMILY = frozenset({"spike", "drift", "blow_up", "update_ratio", "flow"})
CALM = 16


class Watcher:
    """The rules of one rank with what they remember. Call it with each collected step, in order."""

    def __init__(self, rules: Mapping[str, RuleOptions]) -> None:
        self.rules = dict(rules)
        self.table = SeriesTable()
        self.memories = {name: Memory() for name in rules}
        self._load()
        self.count: Count = counted_all  # findings that hold at one more step
        self.part: Part = simply  # runs one rule
        self.knows_loss = False  # whether a judged step had one
        self.updates = UpdatesSeen()
        self.incident = Incident()
        self._last: dict[str, list[Finding]] = {}  # rule → what it reported last, while that lasts

    def _load(self) -> None:
        loaded = {name: load_rule(name) for name in self.rules}
        self._checks = {name: rule.check for name, rule in loaded.items()}
        self._lasts = {name: getattr(rule, "lasts", None) for name, rule in loaded.items()}

    def __call__(self, step_data: StepData) -> list[Finding]:
        """Judge one collected step and return what the rules found."""
        return self.judge(frame_of_step(step_data, self.table))

    def judge(self, frame: Frame) -> list[Finding]:
        """Judge one frame. A step that an error cut short is looked at for non-finite values only."""
        names = self._checks if frame.complete else [name for name in self._checks if name == "nonfinite"]
        self.knows_loss = self.knows_loss or scalar(frame.scalars, "loss") is not None
        self.updates.add(frame)
        found: list[Finding] = []
        for name in names:
            found += self.part(f"the rule {name}", self._judge_by, name, frame) or ()
        lasts = any(self._still_holds(name) for name in FAMILY & self.rules.keys())
        return in_order(self.incident.fold(found, lasts, frame.step, self.rules, self.count))

    def wants_forward(self) -> bool:
        """Tell whether the forward pass of the next step is to be looked at, for a NaN whose origin was not seen."""
        return "nonfinite" in self.rules and wants_forward(self.memories["nonfinite"])

    def _still_holds(self, rule: str) -> bool:
        """Tell whether what a rule reported last holds at this step too."""
        lasts = self._lasts[rule]
        return lasts is not None and lasts(self.memories[rule])

    def _judge_by(self, name: str, frame: Frame) -> list[Finding]:
        memory = self.memories[name]
        memory.numbers[_STEPS] = memory.numbers.get(_STEPS, 0.0) + 1
        fresh = self._checks[name](frame, memory, self.rules[name])
        if name not in FAMILY:
            self._follow(name, fresh, self._still_holds(name), frame.step)
        return fresh

    def _follow(self, rule: str, fresh: list[Finding], lasts: bool, step: int) -> None:
        """Count what a rule reported last if it holds at this step too."""
        if fresh:
            self._last[rule] = fresh
        elif lasts and rule in self._last:
            self._last[rule] = self.count(self._last[rule], step)
        else:
            self._last.pop(rule, None)

    def not_judged(self) -> dict[str, int]:
        """Return the rules that the run was too short for, with how many more collected steps each needs.

        Rules whose findings are notes only are left out.
        """
        seen = {name: int(self.memories[name].numbers.get(_STEPS, 0)) for name in self.rules}
        needs = {name: rule.needs() for name, rule in self.rules.items() if rule.severity != "info"}
        return {name: need - seen[name] for name, need in sorted(needs.items()) if need > seen[name] > 0}

    def change(self, rules: Mapping[str, RuleOptions]) -> None:
        """Judge by these rules from now on; those that go on judging keep what they remember."""
        self.rules = dict(rules)
        self.memories = {name: self.memories.get(name) or Memory() for name in rules}
        self._load()

    def state(self) -> dict[str, Any]:
        """Return all that the rules remember, as JSON values."""
        rules = {name: memory.to_json() for name, memory in self.memories.items()}
        return {"format": FORMAT, "rules": rules, "incident": self.incident.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; rules that are not in it begin anew. Raises FormatError when it is no state."""
        if state.get("format") != FORMAT or not isinstance(state.get("rules"), dict):
            raise FormatError(f"this is not a state of the monitor of format {FORMAT}; remove the file to begin anew")
        self.memories |= {name: Memory.from_json(state["rules"][name]) for name in self.memories.keys() & state["rules"].keys()}
        if isinstance(state.get("incident"), dict):
            self.incident.restore(state["incident"])


class Incident:
    """What goes on in one rank, so that one incident is one finding.

    The rules of `FAMILY` see the same event from different sides, and one after the other: a rate that jumps, the loss that
    follows, levels that stay away, updates that are too large. The finding of the first place, in the first step, is the
    incident's. What they find while it lasts, and for `CALM` collected steps after, is counted as that finding and not told
    again, unless it is graver, or does something that the first did not (an action that only its rule has).

    gravity: of what was told, -1 where nothing goes on. calm: collected steps since it held. told: as it was counted last.
    """

    def __init__(self) -> None:
        self.gravity, self.calm = -1, 0
        self.actions: frozenset[str] = frozenset()
        self.told: list[Finding] = []

    def fold(
        self,
        fresh: Sequence[Finding],
        lasts: bool,
        step: int,
        rules: Mapping[str, RuleOptions],
        count: Count,
    ) -> list[Finding]:
        """Return what is to be told of the findings of a step. lasts: whether what was found before still holds."""
        kin = [finding for finding in fresh if finding.rule in FAMILY]
        if self.gravity >= 0 and (kin or lasts) and self.told:
            self.told = count(self.told, step)
        self.calm = 0 if kin or lasts else self.calm + 1
        if self.calm > CALM:
            self.gravity, self.actions, self.told = -1, frozenset(), []
        fresh_ones: list[Finding] = []
        for finding in in_order(kin):
            actions = frozenset(rules[finding.rule].actions)
            if GRAVITY[finding.severity] > self.gravity or actions - self.actions:
                fresh_ones.append(finding)
                self.gravity, self.actions = max(self.gravity, GRAVITY[finding.severity]), self.actions | actions
        self.told = fresh_ones or self.told
        return [finding for finding in fresh if finding.rule not in FAMILY or finding in fresh_ones]

    def state(self) -> dict[str, object]:
        """Return what is to be remembered over a restart, as JSON values."""
        return {"gravity": self.gravity, "calm": self.calm, "actions": sorted(self.actions)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from what `state` returned."""
        gravity, calm, actions = state.get("gravity"), state.get("calm"), state.get("actions")
        if isinstance(gravity, int) and isinstance(calm, int) and isinstance(actions, Collection):
            self.gravity, self.calm, self.actions = gravity, calm, frozenset(map(str, actions))


def save_state(watcher: Watcher, path: Path) -> None:
    """Write the state of a watcher to a file; the file is the old one or the new one at any time."""
    write_whole(path, orjson.dumps(watcher.state()))


def load_state(watcher: Watcher, path: Path) -> bool:
    """Go on from the state in a file; return whether there was one. Raises FormatError when the file is no state."""
    try:
        state = orjson.loads(read_bounded(path, LARGEST_STATE))
    except FileNotFoundError:
        return False
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{path} is not JSON ({error}); remove it to begin anew") from error
    if not isinstance(state, dict):
        raise FormatError(f"{path} is no state of the monitor; remove it to begin anew")
    watcher.restore(state)  # pyright: ignore[reportUnknownArgumentType]
    return True


def keep_state(watcher: Watcher, path: Path) -> Finding | None:
    """Write the state of a watcher and make its folder; return a warning where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_state(watcher, path)
    except OSError as error:
        message = (
            f"{path} could not be written ({error.strerror or error}): a run that continues this one judges without its past"
        )
        return Finding("probe", "warning", message)
    return None


def resume_state(watcher: Watcher, path: Path) -> Finding | None:
    """Go on from the state in a file, if there is one.

    Return a warning where the file cannot be used: a damaged one is set aside, and the rules begin anew.
    """
    try:
        load_state(watcher, path)
    except (FormatError, OSError) as error:
        try:
            where = f"; it was set aside as {set_aside(path).name}"
        except OSError:
            where = ""
        return Finding("probe", "warning", f"the rules begin anew, because their state cannot be read: {error}{where}")
    return None


def judge_frames(frames: Iterable[Frame], rules: Mapping[str, RuleOptions]) -> list[Finding]:
    """Return what the rules find in a recorded run; see `judge_run`."""
    return judge_run(frames, rules)[0]


def judge_run(
    frames: Iterable[Frame], rules: Mapping[str, RuleOptions], watchers: dict[int, Watcher] | None = None
) -> tuple[list[Finding], str]:
    """Judge a recorded run of one or several ranks: frames in any order of ranks, each rank's own in order of steps.

    The frames of one rank share one `SeriesTable`. Return the findings, and what `unjudged` says. watchers: gets those of the
    ranks.
    """
    watchers = {} if watchers is None else watchers
    found: list[Finding] = []

    def count(seen: Sequence[Finding], step: int) -> list[Finding]:
        return list(recount(found, seen, step).values())

    for frame in frames:
        watcher = watchers.get(frame.place.rank)
        if watcher is None:
            watcher = watchers[frame.place.rank] = Watcher(rules)
            watcher.count = count
        found += watcher.judge(frame)
    return in_order(found), unjudged(watchers.values())


def judged_nothing(watchers: Collection[Watcher]) -> bool:
    """Tell whether no rule has judged any step of any rank."""
    return all(watcher.rules.keys() <= watcher.not_judged().keys() for watcher in watchers)


def unjudged(watchers: Collection[Watcher]) -> str:
    """Return sentences on what no watcher of a run has judged: rules that every rank is too short for, and the loss; or ""."""
    longest = min((watcher.not_judged() for watcher in watchers), key=lambda missing: sum(missing.values()), default={})
    needed = any(OF_THE_LOSS & watcher.rules.keys() for watcher in watchers)
    no_loss = needed and not any(watcher.knows_loss for watcher in watchers)
    updates = [watcher.updates for watcher in watchers]
    skipped = steps_without_update(updates)
    return " ".join(filter(None, [too_few_steps(longest), NO_LOSS if no_loss else "", skipped, no_update(updates)]))


def too_few_steps(missing: Mapping[str, int]) -> str:
    """Return one sentence on what `Watcher.not_judged` returned; "" for nothing."""
    if not missing:
        return ""
    return f"Too few steps for the rules {', '.join(f'{name} ({n} more)' for name, n in missing.items())}."
