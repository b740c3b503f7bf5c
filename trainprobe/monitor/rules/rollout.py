"""Rollouts of reinforcement learning from which nothing, or the wrong thing, can be learnt: the series of `note_rollout`.

At each collected step of rollouts, for `patience` such steps in a row where a share or a level is judged:

- no token counts, or tokens behind the end of their response count;
- the rewards of each prompt's responses are equal (flat groups) in more batches in a row than chance explains: a streak of s
  has p^s < 10^-3, with the share p of such batches before it, 1/2 where none is known; or all responses of each prompt are
  the same tokens;
- advantages are 0 while rewards differ; they are large where rewards are equal to rounding (a division by a spread of 0); they
  sum to 0 over blocks of the batch and not over the responses of a prompt; or within a prompt a better reward has a lower
  advantage. The last and the second are judged only where advantages sum to 0 over each prompt: with a learned baseline, or a
  penalty in the reward, both are in order;
- against the median of the first `start` steps: responses repeat n-grams (above one half, and twice as much), hardly any
  response ends (of a quarter or more), responses are shorter than a tenth, entropy below a tenth or one nat and a half above;
- the largest importance weight before its clamp is above `weight`, and the effective sample size below `effective`;
- of `weight_sync`: tensors that did not arrive, a version below that of the push before, or a push with all the bits of the
  one before although parameters moved between them, as their largest magnitudes show.

Source: group advantages as in Shao et al. (2024), "DeepSeekMath", section 4.1; effective sample size as in Kong (1992).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import numpy as np

from trainprobe.engine.core.records import Finding, Site
from trainprobe.monitor.frames import Frame
from trainprobe.monitor.memory import Memory
from trainprobe.monitor.rules import RuleOptions

PREFIX = "rollout/"
NONE = 1e-6  # of the size of advantages: a mean that is 0
LARGE = 0.1  # an advantage
USUAL = 0.25  # share of responses that end at the start: of fewer, none may end by chance
REARM = 16  # batches without a symptom, behind which it is told again
RARE = 1e-3  # chance of a streak of equal rewards
AGAINST = 0.02  # of pairs: more than ties of rounding
_FROM_START = ("repeated", "ended", "length", "entropy")


class Options(RuleOptions):
    """Settings of the rule `rollout`."""

    patience: int = 4
    """For how many batches of rollouts in a row a share or a level must be out of the ordinary."""
    start: int = 8
    """How many batches at the beginning say what is ordinary."""
    weight: float = 20.0
    """An importance weight of a token, before its clamp, that is too large."""
    effective: float = 0.5
    """The effective sample size, as a share of the tokens, that is too small."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The series of one batch."""

    values: Mapping[str, float]
    first: Mapping[str, float]
    """The median of the first batches, where it is known."""
    centred: bool
    """Whether advantages sum to 0 over each prompt, as was seen so far."""
    usual: bool
    """Whether so many batches in a row with equal rewards are usual here, as where a reward is rare."""
    back: float
    """The version of the push before, of a push that goes back; else NaN."""
    same: bool
    """Whether the last push had the bits of the one before it although parameters moved."""

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, np.nan)  # no comparison holds

    def start(self, name: str) -> float:
        return self.first.get(name, np.nan)


class _Symptom(NamedTuple):
    series: str
    """The series of `note_rollout` that shows it, without the prefix."""
    holds: Callable[[_Batch, Options], bool]
    message: str
    """With the number as `{x}` and its first level as `{first}`."""
    expected: str
    next: str
    lasting: bool = False
    """Whether it must hold for `patience` batches."""


# in the order in which they are told: what explains others comes first
_SYMPTOMS = (
    _Symptom(
        "push_lost",
        lambda b, _: b["push_lost"] > 0,
        "a push did not arrive in the engine as sent: {x:.0f} of its tensors",
        "0",
        "`weight_sync`'s `received` says which, and why",
    ),
    _Symptom(
        "push_version",
        lambda b, _: b["push_version"] < b.back,
        "version {x:.0f} was pushed behind version {back:.0f}: the engine goes back",
        "versions that grow",
        "look at which weights are pushed when, and at their numbers",
    ),
    _Symptom(
        "push_changed",
        lambda b, _: b.same,
        "the last push had the bits of the one before it, and parameters moved between them",
        "some other bits",
        "look at which model is pushed, and whether updates are lost in its cast",
    ),
    _Symptom(
        "length", lambda b, _: b["length"] == 0, "no token of the rollouts counts", "tokens in the mask", "look at the mask"
    ),
    _Symptom(
        "reward",
        lambda b, _: "reward" in b.values and not np.isfinite(b["reward"]),
        "a reward of the batch is {x}",
        "a finite number",
        "look at the reward function",
    ),
    _Symptom(
        "behind_end",
        lambda b, _: b["behind_end"] > 0,
        "{x:.0f} tokens behind the end of their response count",
        "0",
        "end the mask with the first end token",
    ),
    _Symptom(
        "advantage",
        lambda b, _: b["advantage"] == 0 and b["flat_groups"] < 1,
        "all advantages are 0 while rewards differ",
        "advantages that follow the rewards",
        "look at what becomes of the rewards before the loss",
    ),
    _Symptom(
        "at_equal_rewards",
        lambda b, _: b.centred and b["at_equal_rewards"] > LARGE,
        "an advantage is {x:.3g} where a prompt has equal rewards: they were divided by their rounding",
        "0",
        "add 1e-4 to the standard deviation, or leave such prompts out",
    ),
    _Symptom(
        "off_centre",
        lambda b, _: b["off_centre"] > 0.01 and b["off_blocks"] < NONE,
        "advantages sum to 0 over blocks of the batch that cut across prompts",
        "a sum of 0 over the responses of each prompt",
        "look at the order of rewards and prompts, and at how they are grouped",
    ),
    _Symptom(
        "against_reward",
        lambda b, _: b.centred and b["against_reward"] > AGAINST,
        "advantages do not follow the rewards: {x:.0%} of the pairs of a prompt are turned round",
        "0",
        "look at the sign and the order of the advantages",
    ),
    _Symptom(
        "repeated",
        lambda b, _: b["repeated"] > max(0.5, 2 * b.start("repeated")),
        "responses repeat themselves: {x:.0%} of their 4-grams came before, {first:.0%} at the start",
        "about as at the start",
        "look at the reward, the KL penalty and the temperature",
        lasting=True,
    ),
    _Symptom(
        "ended",
        lambda b, _: b["ended"] < 0.1 * b.start("ended") and b.start("ended") >= USUAL,
        "hardly a response ends: {x:.0%}, {first:.0%} at the start",
        "about as at the start",
        "look at the longest length, the end token and the reward",
        lasting=True,
    ),
    _Symptom(
        "length",
        lambda b, _: 0 < b["length"] < max(0.1 * b.start("length"), min(2.0, 0.3 * b.start("length"))),
        "responses became short: {x:.3g} tokens, {first:.3g} at the start",
        "about as at the start",
        "look at the reward, and at the weight that the loss gives to long responses",
        lasting=True,
    ),
    _Symptom(
        "entropy",
        lambda b, _: b["entropy"] < 0.1 * b.start("entropy") or b["entropy"] > b.start("entropy") + 1.5,
        "the entropy of the policy went to {x:.3g} nats, {first:.3g} at the start",
        "about as at the start",
        "look at the learning rate, the KL penalty and the temperature",
        lasting=True,
    ),
    _Symptom(
        "alike",
        lambda b, _: b["alike"] == 1,
        "all responses of each prompt are the same tokens",
        "responses that differ",
        "look at temperature and seeds of the engine",
        lasting=True,
    ),
    _Symptom(
        "flat_groups",
        lambda b, _: b["flat_groups"] == 1 and b["alike"] != 1 and not b.usual,
        "the responses of each prompt have equal rewards: nothing can be learnt",
        "rewards that differ within a prompt",
        "look at the reward function, and at prompts that are solved or too hard",
    ),
    _Symptom(
        "weight_max",
        lambda b, o: b["weight_max"] > o.weight and b["effective_share"] < o.effective,
        "importance weights reach {x:.3g} before their clamp, and few tokens decide",
        "weights near 1",
        "`trainprobe rollout-compare FILE`, of a file with both log-probabilities, says why",
        lasting=True,
    ),
)


def check(frame: Frame, memory: Memory, options: Options) -> list[Finding]:
    """Judge the batch of rollouts of this step, if there is one."""
    values = {name.removeprefix(PREFIX): value for name, value in frame.scalars.items() if name.startswith(PREFIX)}
    if not values and not memory.numbers.get("awaits"):
        return []
    if values.get("length") == 0:  # all else follows from it
        values = {"length": 0.0} | {name: x for name, x in values.items() if name.startswith("push_")}
    levels = _first_levels(values, memory, options.start)
    back, same = _follow_pushes(frame, values, memory)
    batch = _Batch(values, levels, _centred(values, memory), _usual(values, memory), back, same)
    rollouts = any(not name.startswith("push_") for name in values)  # else streaks of batches stay as they are
    judged = [(i, symptom) for i, symptom in enumerate(_SYMPTOMS) if rollouts or symptom.series.startswith("push_")]
    rows = np.array([memory.row(f"{i} {symptom.series}") for i, symptom in judged])
    holds = np.array([symptom.holds(batch, options) for _, symptom in judged])
    lasting = np.array([symptom.lasting for _, symptom in judged])
    held = memory.lasting("held", rows, holds) >= np.where(lasting, options.patience, 1)
    begins = memory.newly("told", rows, holds & held, REARM)
    return [_finding(symptom, batch, frame, options) for (_, symptom), new in zip(judged, begins, strict=True) if new]


def _finding(symptom: _Symptom, batch: _Batch, frame: Frame, options: Options) -> Finding:
    x = batch[symptom.series]
    message = symptom.message.format(x=x, first=batch.start(symptom.series), back=batch.back)
    return options.found(
        frame,
        message + (f", for {options.patience} batches in a row" if symptom.lasting else ""),
        Site("scalar", PREFIX + symptom.series, "value"),
        measured=x,
        expected=symptom.expected,
        next=symptom.next,
    )


def _first_levels(values: Mapping[str, float], memory: Memory, start: int) -> dict[str, float]:
    """Return the median of the first batches of each series that is judged by them, once it is known."""
    rows = {name: memory.row(name) for name in _FROM_START if np.isfinite(values.get(name, np.nan))}
    levels = memory.array("first", width=start, fill=np.nan)
    found: dict[str, float] = {}
    for name, row in rows.items():
        free = np.flatnonzero(np.isnan(levels[row]))
        if free.size:
            levels[row, free[0]] = values[name]
        else:
            found[name] = float(np.median(levels[row]))
    return found


def _usual(values: Mapping[str, float], memory: Memory) -> bool:
    """Tell whether a streak of batches with equal rewards has a chance above `RARE`, by the share of such before it."""
    if "flat_groups" not in values:
        return True
    numbers = memory.numbers
    streak = numbers.get("streak", 0.0)
    if values["flat_groups"] < 1:
        numbers |= {
            "flat": numbers.get("flat", 0.0) + streak,
            "batches": numbers.get("batches", 0.0) + streak + 1,
            "streak": 0.0,
        }
        return True
    numbers["streak"] = streak + 1
    share = (numbers.get("flat", 0.0) + 1) / (numbers.get("batches", 0.0) + 2)
    return bool(share ** (streak + 1) > RARE)


def _follow_pushes(frame: Frame, values: Mapping[str, float], memory: Memory) -> tuple[float, bool]:
    """Return the version before that of this step's push where that is higher; and whether a push had only the bits before.

    A push of step n is before its update or behind it, so the second is known at the next step that is collected: parameters
    moved since the push at m where their bits differ at n and m, and at the steps behind these.
    """
    numbers, version = memory.numbers, values.get("push_version", np.nan)
    known = not np.isnan(version)
    now = _magnitudes(frame, memory) if known or numbers.get("awaits") else 0.0
    same = bool(numbers.get("awaits") and numbers["idle"]) and numbers.get("behind", now) != now
    if numbers.get("awaits"):
        numbers |= {"behind": now, "awaits": 0.0}
    back = np.nan
    if known:
        back, moved = numbers.get("version", np.nan), numbers.get("parameters", now) != now
        idle = float(values.get("push_changed") == 0 and moved)
        numbers |= {"version": version, "parameters": now, "idle": idle, "awaits": 1.0}
    return (back if back > version else np.nan), same


def _magnitudes(frame: Frame, memory: Memory) -> float:
    """Return a number that tells all parameters from others, by their largest magnitudes, which round nowhere."""
    at, places = memory.scratch.get("parameters", (None, None))
    if at is not frame.at:
        series = [frame.table.series[i] for i in frame.at.tolist()]
        wanted = [s.statistic == "absmax" and s.address.kind == "parameter" and s.address.slot == "value" for s in series]
        places = np.flatnonzero(wanted)
        memory.scratch["parameters"] = frame.at, places
    return float(crc32(frame.values[places].tobytes()))


def _centred(values: Mapping[str, float], memory: Memory) -> bool:
    """Tell whether advantages summed to 0 over each prompt, in the last three batches whose rewards show it."""
    if values.get("flat_groups", 1.0) < 1 and values.get("advantage", 0.0) > 0:
        centred = values.get("off_centre", np.inf) < NONE
        memory.numbers["centred"] = memory.numbers.get("centred", 0.0) + 1 if centred else 0.0
    return memory.numbers.get("centred", 0.0) > 2
