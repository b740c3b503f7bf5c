"""One step of two dumps of different layouts: the calls of the whole model, each value joined from the ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainprobe.dump_compare.arguments import about_rates
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.intervals import ALIKE
from trainprobe.dump_compare.judge import Judged, judge_calls
from trainprobe.dump_compare.layouts.expert_numbers import number_experts
from trainprobe.dump_compare.layouts.grouping import (
    other_micro_batches,
    settle_averaging,
    table_of,
)
from trainprobe.dump_compare.layouts.joined import JoinedSide
from trainprobe.dump_compare.layouts.model_calls import JoinedCalls
from trainprobe.dump_compare.layouts.names import pair_names
from trainprobe.dump_compare.layouts.optimizer_steps import judge_states
from trainprobe.dump_compare.layouts.split_table import Splits, splits
from trainprobe.dump_compare.layouts.states import add_states, are_cut_otherwise, left_out
from trainprobe.dump_compare.layouts.topology import layout_of, other_layouts
from trainprobe.dump_compare.pairing import CallPair, RankPair, pair_steps, ranks_of
from trainprobe.dump_compare.parallel_ranks import suitable, without_agreeing
from trainprobe.dump_compare.parameter_states import renamed_parameter
from trainprobe.dump_compare.results import Compared
from trainprobe.dump_compare.scale_factors import see_factors
from trainprobe.engine.core.processes import Run, in_turn
from trainprobe.errors import CompareError

Maker = Callable[[RankPair, Sequence[Judged], tuple[Side, Side]], Any]  # what else is worked out while dumps are open


def compare_layouts(
    step: int,
    a: Sequence[Side],
    b: Sequence[Side],
    rename: Callable[[str], str],
    make: Mapping[str, Maker],
    known: Splits,
) -> tuple[Compared, list[str]]:
    """Compare all ranks of one step of two dumps as one model each; return also a sentence for each side with calls of its own.

    Modules, gradients of weights, saved values and what the dumps hold of parameters and optimizers are compared, and operators
    as far as it is known how their values lie over the ranks (see operators). rename: is given each name of A. make: as for
    `compare_rank`. known: what is known of how values lie over ranks.
    """
    numbered = number_experts(a, b)
    tables = table_of(a), table_of(b)
    sides = JoinedSide("A", a), JoinedSide("B", b)
    summed = settle_averaging(*tables) if all(rank.step_data.states for rank in (*a, *b)) else ""
    structure = pair_names(sides, rename)
    rename = structure.renaming(rename)
    maker = JoinedCalls(tables, sides, known, rename, structure)
    tables[0].rename(rename)
    pairs = maker.pairs()
    alone, of_states = add_states(pairs, sides, lambda name: renamed_parameter(name, rename), maker.fused())
    places = [CallPair(i, pair.a, pair.b) for i, pair in enumerate(pairs)]
    for i, side in enumerate(sides):
        side.calls += [call for pair in places if (call := (pair.a, pair.b)[i]) is not None]
    judged = judge_calls(places, *sides)
    judge_states(judged, sides)
    see_factors(judged, *sides)
    at = RankPair(step, a[0].step_data.place.rank, a[0].folder.parent, b[0].folder.parent)
    unread = [text for rank in (*a, *b) for text in rank.unread]
    said = f"A is {tables[0].layout} and B is {tables[1].layout}: the shards of each tensor were joined"
    if tables[0].layout == tables[1].layout and tables[0].micros != tables[1].micros:
        said = f"A has {tables[0].micros} micro-batches a step and B {tables[1].micros}: those of each step were joined"
    elif tables[0].layout == tables[1].layout:
        said = f"A and B are {tables[0].layout} with other shards of weights: those of each tensor were joined"
    made = {name: each(at, judged, sides) for name, each in make.items()}
    scalars = {f"on rank {r.step_data.place.rank} of {side.name}": r.step_data.scalars for side in sides for r in side.ranks}
    rates = about_rates(scalars)
    notes = [
        said,
        *numbered,
        *([summed] if summed else []),
        *structure.note(),
        *maker.notes(),
        *maker.about_copies(judged),
        *_about_order(judged),
        *of_states,
        *left_out([*a, *b]),
        *rates,
    ]
    frameworks = a[0].step_data.framework, b[0].step_data.framework
    values = sum(len(one.values) for one in judged)
    structured = structure.evidence()
    return Compared(
        at, judged, *frameworks, unread, notes, made, joined=True, by_structure=structured, values=values, rates=rates
    ), [
        *maker.missing(),
        *alone,
    ]


def _about_order(judged: Sequence[Judged]) -> list[str]:
    """Return a sentence on the values of which it is not known whether their bits are the same."""
    alike = [(one, value) for one in judged for value in one.values if value.interval == ALIKE]
    if not alike:
        return []
    one, value = alike[0]
    return [
        f"{len(alike)} values agree as far as statistics tell, which do not see elements in another order; the first "
        f"is {value.slot} of {one.call.name} ({one.call.phase})"
    ]


@dataclass(frozen=True, slots=True)
class _StepTask:
    """One step of two layouts that is to be compared. a, b: the folders of all ranks. Others are as for `compare_layouts`."""

    step: int
    a: Sequence[Path]
    b: Sequence[Path]
    rename: Callable[[str], str]
    make: Mapping[str, Maker]
    known: Splits
    all_calls: bool
    opened: tuple[Side, ...] = ()  # the first ranks of both sides, where they were read before


def _carry_out(task: _StepTask) -> tuple[Compared, list[str]]:
    first = task.opened or (Side(task.a[0]), Side(task.b[0]))
    a, b = ([side, *map(Side, folders[1:])] for side, folders in zip(first, (task.a, task.b), strict=True))
    one, alone = compare_layouts(task.step, a, b, task.rename, task.make, task.known)
    return one if task.all_calls else without_agreeing(one), alone


@dataclass(frozen=True, slots=True)
class OtherLayouts:
    """What became of two dumps that may be of two layouts; nothing was compared where they are of one.

    missing: a sentence for each step that only one dump has, and for what a step has alone. opened: what was read of the first
    ranks to find out that both have one layout.
    """

    compared: Sequence[Compared] = ()
    missing: Sequence[str] = ()
    opened: Mapping[Path, Side] = field(default_factory=dict[Path, Side])


def _is_spread_otherwise(first: tuple[Side, Side]) -> bool:
    """Return whether dumps of one framework and layout hold other parts of weights, or other numbers of micro-batches.

    DDP and FSDP have one layout, ranks that share samples, and not the same shards.
    """
    one, other = (side.step_data for side in first)
    alike = one.framework == other.framework and layout_of(one.place) == layout_of(other.place)
    return alike and (other_micro_batches(*first) or are_cut_otherwise(*first))


def compare_other_layouts(
    a: Path,
    b: Path,
    rename: Callable[[str], str],
    make: Mapping[str, Maker],
    layout: Path | None = None,
    run: Run[_StepTask, tuple[Compared, list[str]]] | None = None,
    *,
    all_calls: bool = True,
    joins: bool = True,
) -> OtherLayouts:
    """Compare the steps of two dumps if their layouts differ, or how they spread weights and samples (`joins`: where they may).

    layout: a user's table of splits. run: carries out the comparisons of the steps, in this process or in others. all_calls:
    whether calls that agree are wanted too. Compares nothing where both have one layout, or a dump does not say its own: ranks
    are then compared one by one. Raises FormatError where a path holds no dump or one cannot be read, CompareError where ranks
    are missing.
    """
    pairs, missing = pair_steps(ranks_of(a), ranks_of(b))
    known, tasks = splits(layout), list[_StepTask]()
    for step, *folders in pairs:
        ranks = [list(of_side.values()) for of_side in folders]
        first = Side(ranks[0][0]), Side(ranks[1][0])
        others = other_layouts(*[(len(each), side.step_data.place) for each, side in zip(ranks, first, strict=True)])
        if not others and not (joins and _is_spread_otherwise(first)):
            return OtherLayouts(opened={side.folder: side for side in first})
        for name, each, side in zip("AB", ranks, first, strict=True):
            world = side.step_data.place.world_size
            if len(each) < world:
                raise CompareError(f"{name} holds step {step} of {len(each)} of its {world} ranks: joining needs all of them")
        kept = first if len(pairs) == 1 and run is None else ()  # of several steps no two are in memory at once
        tasks.append(_StepTask(step, ranks[0], ranks[1], rename, make, known, all_calls, kept))
    if run is None:
        run = suitable([folder for task in tasks for folder in (*task.a, *task.b)]) if len(tasks) > 1 else in_turn
    compared: list[Compared] = []
    for task, (one, alone) in zip(tasks, run(_carry_out, tasks), strict=True):
        compared.append(one)
        missing += [f"step {task.step}: {sentence}" for sentence in alone]
    return OtherLayouts(compared, missing)
