"""After a resume instead of straight on: what both runs saved at the same step.

The saved states are read as `ckpt-compare` reads them: any format, any cut into ranks, nothing of them is run. What differs is
told by kind, and the kind that cannot follow from the others first: a wrong learning rate makes wrong weights one step later,
and no wrong weight makes a wrong rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trainprobe.ckpt_compare.compare import compare, logical
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.pieces import KINDS as CONTENT
from trainprobe.ckpt_compare.pieces import Checkpoint
from trainprobe.ckpt_compare.results import CheckpointComparison, TensorRow
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.core.words import counted
from trainprobe.errors import CompareError

WEIGHTS, MOMENTS, BUFFERS, AVERAGED = "weights", "moments", "buffers", "averaged weights"
OTHER = ""  # what no resume is known to bring back, such as an argument of the program
COUNTERS, RATES, SCALE, DATA, RANDOM = "step counters", "learning rates", "loss scale", "data position", "random states"
# what a resume has to bring back, first what cannot follow from anything behind it
KINDS = (COUNTERS, RATES, SCALE, DATA, RANDOM, WEIGHTS, AVERAGED, BUFFERS, MOMENTS)
_LEARNT = (WEIGHTS, BUFFERS, AVERAGED)
_NOT_RESTORED = 0.05  # relative difference of weights that no few steps make
_SHRUNK = 0.3  # of the squared norm
_OF_PLACES = (
    (SCALE, re.compile(r"scaler|loss_scale|growth|(^|[._])scale$")),
    (RANDOM, re.compile(r"rng|random|generator|seed")),
    (RATES, re.compile(r"sched|(^|[._])lr|rate|last_epoch|warmup")),
    (DATA, re.compile(r"sampl|loader|data|epoch|batch|consumed|position|cursor|shard")),
    (COUNTERS, re.compile(r"(^|[._])(step|iter|iteration|global_step|updates|n_averaged)s?$")),
)
_BUFFERS = re.compile(r"(running_mean|running_var|num_batches_tracked|_ema|inv_freq|cos_cached|sin_cached)( \(|$)")
_NEXT = {
    COUNTERS: "load the optimizer's whole state, and the loop's own counter",
    RATES: "load the scheduler after it is made with this optimizer, and step it where the first run did",
    SCALE: "save and load `scaler.state_dict()`",
    DATA: "save where the data stood, and skip as many batches or load the sampler's state",
    RANDOM: "save and load the states of torch, each device, NumPy and Python, and of own generators",
    WEIGHTS: "load with `strict=True` and look at the keys; see `trainprobe ckpt-compare` for each tensor",
    AVERAGED: "save and load the averaged model too",
    BUFFERS: "save `model.state_dict()` and not parameters alone; make buffers persistent",
    MOMENTS: "load the optimizer's state after its parameters are those that train",
}
_AT_ONCE = "save right after the resume, before its first step. If nothing differs there, it trained on other data"


@dataclass(frozen=True, slots=True)
class Held:
    """One value of a kind. differs: in another way than by rounding. apart: relative difference, where it is known.

    shrunk: it is far smaller in the resumed run, as what begins anew is.
    """

    kind: str
    name: str
    differs: bool
    rounding: bool = False
    apart: float = 0.0
    told: str = ""
    shrunk: bool = False


def held_by(compared: CheckpointComparison) -> list[Held]:
    """Return all values that two saved states hold, by kind."""
    found = [_of_tensor(row) for row in compared.rows]
    for row in compared.state:
        kind = _kind_of_place(f"{row.what}.{row.path}" if row.what != "args" else row.path)
        if not _says_nothing(row.path) and (kind or not row.equal):
            found.append(Held(kind or OTHER, f"{row.what} {row.path}", not row.equal, told=f"{row.a} against {row.b}"))
    return [*found, *_lost(compared.a, compared.b)]


def _lost(straight: Checkpoint, resumed: Checkpoint) -> Iterator[Held]:
    """Yield what a resumed run has none of: whole sections, and slots of the optimizer."""
    for what in straight.state.keys() - resumed.state.keys():
        for path in straight.state[what]:
            kind = _kind_of_place(f"{what}.{path}")
            if kind and not _says_nothing(path):
                yield Held(kind, f"{what} {path}", True, told="not in the resumed state")
    slots = [{t.slot for t in one.tensors.values() if t.what == "optimizer"} for one in (straight, resumed)]
    for slot in sorted(slots[0] - slots[1]):
        yield Held(COUNTERS if slot == "step" else MOMENTS, f"optimizer {slot}", True, told="not in the resumed state")


def judge(values: Sequence[Held]) -> Verdict:
    """Return whether a resume is right, from what both states hold."""
    if all(value.kind == OTHER for value in values):
        return Verdict(3, "not comparable: the two states have nothing in common")
    seen = [kind for kind in KINDS if any(value.kind == kind for value in values)]
    unseen = [f"not judged, as it is in neither state: {kind}" for kind in KINDS if kind not in seen]
    unseen += [f"not judged, as it is of no known kind: {v.name}: {v.told}" for v in values if v.kind == OTHER]
    wrong = {kind: found for kind in KINDS if (found := [v for v in values if v.kind == kind and v.differs])}
    if not wrong:
        rounded = sum(value.rounding for value in values)
        held = sum(value.kind != OTHER for value in values)
        text = f"the resume is right in all that was judged: {counted(held, 'value')} of {', '.join(seen)}"
        text += f", {rounded} within rounding" if rounded else ""
        if other := len(values) - held:
            return Verdict(3, f"{text}; {counted(other, 'value')} of no known kind differ{'s' * (other == 1)}", unseen)
        return Verdict(1 if rounded else 0, text, unseen)
    total = {kind: sum(value.kind == kind for value in values) for kind in KINDS}
    first = _first(wrong, total[MOMENTS])
    order = [first, *(kind for kind in wrong if kind != first)]
    details = [_line(kind, wrong[kind], total[kind]) for kind in order]
    if first in _LEARNT and len(wrong.get(WEIGHTS, ())) == total[WEIGHTS]:
        hidden = [kind for kind in (DATA, RANDOM) if kind not in seen]
        if hidden:
            text = f"{first}, or the {' or '.join(hidden)}, which neither state holds: {_AT_ONCE}"
            return Verdict(2, f"the resume is wrong: {text}", [*details, *unseen])
        details.append(f"all weights differ, which another batch would do as well: {_AT_ONCE}")
    return Verdict(2, f"the resume is wrong: {first}: {_NEXT[first]}", [*details, *unseen])


def _first(wrong: dict[str, list[Held]], moments: int) -> str:
    """Return the kind that the others follow from. moments: how many there are.

    Weights that differ before a step give every parameter another gradient, so that all moments differ after it. Where some
    are the same, or most are far smaller, the moments themselves were not brought back.
    """
    free = [kind for kind in KINDS[:5] if kind in wrong]
    own = wrong.get(MOMENTS, [])
    if free or (own and (len(own) < moments or 2 * sum(value.shrunk for value in own) >= len(own))):
        return (free or [MOMENTS])[0]
    lost = [kind for kind in _LEARNT if max((v.apart for v in wrong.get(kind, ())), default=0) > _NOT_RESTORED]
    return (lost or [kind for kind in (*_LEARNT, MOMENTS) if kind in wrong])[0]


def _line(kind: str, found: Sequence[Held], total: int) -> str:
    first = max(found, key=lambda value: value.apart)
    return f"{kind}: {len(found)} of {total} differ, such as {first.name}{f': {first.told}' if first.told else ''}"


def _of_tensor(row: TensorRow) -> Held:
    differs = row.verdict not in ("identical", "rounding")
    apart = row.difference.relative_l2 if row.verdict == "differ" else float(differs)
    told = f"{apart:.2g} apart" if row.verdict == "differ" else row.verdict
    shrunk = row.difference.square_b < _SHRUNK * row.difference.square_a
    return Held(_kind_of_tensor(row), row.key, differs, row.verdict == "rounding", apart, told, shrunk)


def _kind_of_tensor(row: TensorRow) -> str:
    name = row.key
    if row.what == "optimizer":
        return COUNTERS if re.search(r"(^|[./ :])step$", name) else MOMENTS
    if _BUFFERS.search(name):
        return BUFFERS
    return AVERAGED if re.search(r"\((.*ema.*|.*averag.*|swa.*)\)$", name) else WEIGHTS


def _kind_of_place(path: str) -> str:
    if path.startswith("rng"):
        return RANDOM
    return next((kind for kind, words in _OF_PLACES if words.search(path.lower())), "")


def _says_nothing(path: str) -> bool:
    """Tell whether a value differs after a right resume too: a time, a path, where it began, or Lightning's begun epochs.

    A resume at the end of an epoch counts the one that it begins once less.
    """
    apart = r"time|date$|version|host|path|dir$|uuid|resume|init_from$|(^|\.)load$|epoch_progress\.\w+\.(ready|started)$"
    return re.search(apart, path.lower()) is not None


def resume_check(
    straight: Annotated[Path, typer.Argument(help="What the run that went on saved.", metavar="STRAIGHT")],
    resumed: Annotated[Path, typer.Argument(help="What the resumed run saved at the same step.", metavar="RESUMED")],
    json: Json = None,
    html: Html = None,
) -> int:
    """Say whether a resumed run has what the run that went on has, and which kind of state it lacks.

    Save both at the same step, best right after the resume or one step later. Exit code: 0 the same bits, 1 within rounding,
    2 wrong, 3 not comparable, or values of no known kind differ.
    """
    verdict = judge(held_by(compared(straight, resumed)))
    return answered(verdict, "resume-check", f"{straight}, {resumed}", json, html)


def compared(straight: Path, resumed: Path) -> CheckpointComparison:
    """Return the comparison of all that two saved states hold. Raises FormatError where one cannot be read."""
    states = open_checkpoint(straight), open_checkpoint(resumed)
    with suppress(CompareError):  # names of a family whose shapes are others: they stay as they are
        states = logical(*states)
    return compare(*states, CONTENT)
