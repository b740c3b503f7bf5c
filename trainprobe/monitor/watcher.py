"""Puts the rules to each step of one rank: live as a watcher of the probe, offline over a recorded run, by the same code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.core.findings import Count, counted_all, merged, ranks_of, recount
from trainprobe.engine.core.guard import Part, simply
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.core.words import numbered
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded, set_aside, write_whole
from trainprobe.errors import FormatError
from trainprobe.monitor.audit.relations import STAGES, load_relation, relation_names
from trainprobe.monitor.frames import SCALED, Frame, SeriesTable, frame_of_step
from trainprobe.monitor.incidents import FAMILY, Incident
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import RuleOptions, load_rule
from trainprobe.monitor.rules.nonfinite import wants_forward
from trainprobe.monitor.scalar_names import role_of, scalar
from trainprobe.monitor.updates_seen import UpdatesSeen, steps_without_update

FORMAT = 1
_STEPS = "collected steps"  # in the memory of each rule
OF_THE_LOSS = frozenset({"blow_up", "drift", "plateau", "spike"})  # rules that judge it
NO_LOSS = 'Not judged: the loss, which no step recorded (`probe.note("loss", loss)` records it).'


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
        return in_order(self.incident.fold(found, lasts, frame.step, self.rules, self.count, in_order))

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
    skipped = steps_without_update(watcher.updates for watcher in watchers)
    return " ".join(filter(None, [too_few_steps(longest), NO_LOSS if no_loss else "", skipped]))


def too_few_steps(missing: Mapping[str, int]) -> str:
    """Return one sentence on what `Watcher.not_judged` returned; "" for nothing."""
    if not missing:
        return ""
    return f"Too few steps for the rules {', '.join(f'{name} ({n} more)' for name, n in missing.items())}."


def causes(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding a cause, causes before consequences.

    A NaN that a collective handed to a rank, or that the rank sees only once gradients have been exchanged, is that of the rank
    that made it in the same step, as `trainprobe nan-trace` reports it. A spike that a rank sees only then, likewise.
    """
    ordered = in_order(merged(findings))
    ordered.sort(key=lambda f: (f.step is None, f.step or 0, _is_handed_over(f)))  # behind what may have made it
    found: list[Finding] = []
    reached: dict[int, set[int]] = {}  # where in `found` a non-finite value's origin is → the ranks that it reached
    born: dict[tuple[str, int | None], int] = {}  # rule and step → where in `found` the origin of its values is
    for finding in ordered:
        origin = born.get((finding.rule, finding.step))
        if origin is not None and _came_from(finding, found[origin]):
            reached.setdefault(origin, set()).update(ranks_of(finding))
            continue
        if finding.rule in _CARRIED:
            born.setdefault((finding.rule, finding.step), len(found))
        found.append(finding)
    return [_reaching(finding, reached.get(i, set())) for i, finding in enumerate(found)]


_CARRIED = frozenset({"nonfinite", "spike"})  # rules whose values the exchange of gradients carries to other ranks


def _is_handed_over(finding: Finding) -> bool:
    """Tell whether a collective gave a rank what is not finite, and the rank had given it finite values."""
    return finding.rule == "nonfinite" and finding.site is not None and finding.site.kind == "collective"


def _came_from(finding: Finding, origin: Finding) -> bool:
    """Tell whether a non-finite value was handed over, or seen after the exchange of gradients, and `origin` made elsewhere."""
    exchanged = STAGES.index("whole gradient")
    elsewhere = not {*ranks_of(finding)} & {*ranks_of(origin)}
    later = _stage(origin)[0] < exchanged <= _stage(finding)[0]
    handed = _is_handed_over(finding) and not _is_handed_over(origin)
    return elsewhere and (later or handed) and origin.severity == finding.severity


def _reaching(finding: Finding, ranks: Set[int]) -> Finding:
    """Return the finding of the ranks that made a non-finite value, with those that it reached.

    What a collective handed to all ranks, and none of them made, the collective made: a sum that overflows.
    """
    if not ranks:
        every = _is_handed_over(finding) and finding.place is not None and len(ranks_of(finding)) == finding.place.world_size
        return replace(finding, message=f"{finding.message}; no rank gave it, the collective made it") if every else finding
    made, reached = (numbered("rank", each) for each in (ranks_of(finding), ranks))
    message = f"{finding.message}; {made} made it, and it reached {reached}"
    return replace(finding, ranks=tuple(sorted({*ranks_of(finding), *ranks})), message=message)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with causes before consequences.

    By step, then by where in a step they arise, gravity and rank; findings about the whole run come last.
    """
    return sorted(findings, key=lambda f: (f.step is None, f.step or 0, *_stage(f), _GRAVITY[f.severity], ranks_of(f)))


def _stage(finding: Finding) -> tuple[int, int]:
    """Return the stage of a step in which a violation arises, and its order within the stage.

    A rule says which number is wrong, and a relation of the same stage why: the relation comes first.
    """
    if finding.rule in relation_names():
        return STAGES.index(load_relation(finding.rule).STAGE), relation_names().index(finding.rule)
    site, behind = finding.site, len(relation_names())
    if site is None:
        return len(STAGES), behind
    slot = site.slot.split(".")[0]
    if site.kind == "scalar":
        return _OF_SCALARS.get(role_of(site.name) or "", STAGES.index("evaluation")), behind
    places = (place for part, place in _OF_SLOTS if slot.startswith(part) or slot.endswith(part))
    return next(places, STAGES.index("forward")), behind


_GRAVITY = {"error": 0, "warning": 1, "info": 2}
_OF_SCALARS = {
    "loss": STAGES.index("forward"),
    "loss scale": STAGES.index("backward"),
    "gradient norm": STAGES.index("clipping"),
    "learning rate": STAGES.index("rate"),
}
_OF_SLOTS = (  # the first that fits: how the slot begins or ends
    ("_after", STAGES.index("update")),
    ("update", STAGES.index("update")),
    ("exp_avg", STAGES.index("update")),
    ("grad_output", STAGES.index("backward")),
    ("grad_input", STAGES.index("backward")),
    ("grad_unreduced", STAGES.index("backward")),
    (SCALED, STAGES.index("backward")),
    ("grad_unclipped", STAGES.index("whole gradient")),
    ("grad", STAGES.index("clipping")),
)
