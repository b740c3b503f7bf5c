"""Print how dump-compare judges healthy pairs and planted differences.

`python -m benchmarks.dump_compare [PART] [--only TEXT] [--plan NAME] [--folder DIR]`, PART one of healthy, foreign, planted,
sixteen_bits, hostile, layouts, large and stored; all of them without it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.dump_compare import foreign as foreign_models
from benchmarks.dump_compare import layouts as layout_pairs
from benchmarks.dump_compare import sixteen_bits as in_16_bits
from benchmarks.dump_compare.healthy import PAIRS, PLANS
from benchmarks.dump_compare.hostile import MUTATIONS, mutate
from benchmarks.dump_compare.large import measure as measure_large
from benchmarks.dump_compare.planted import PLANTS
from benchmarks.dump_compare.runs import Way, train
from benchmarks.dump_compare.stored import measure as measure_stored
from trainprobe.dump_compare.command import compare_dumps, compare_rank
from trainprobe.dump_compare.pairing import pair_ranks
from trainprobe.dump_compare.results import DumpsVerdict
from trainprobe.dump_compare.verdict import judge_runs
from trainprobe.engine.core.step_data import entry_name

SEEDS = 40  # of each mutation
CALLS = 100_000  # a side, of the large dumps


def healthy(only: str, plans: list[str], folder: Path) -> None:
    """Print a line a healthy pair and plan."""
    codes: Counter[int] = Counter()
    for name, (subject, *ways) in PAIRS.items():
        if only not in name:
            continue
        for plan in plans:
            a, b = (
                train(folder / name / plan / side, subject, way, **PLANS[plan]) for side, way in zip("ab", ways, strict=True)
            )
            found = judged(a, b)
            codes[found.code] += 1
            print(f"{found.code} {name} [{plan}] {dict(found.counts)}\n    {found.sentence}", flush=True)
    print(f"healthy pairs by exit code: {dict(codes)}")


def foreign(only: str, plans: list[str], folder: Path) -> None:
    """Print a line a healthy pair of a model that nobody here wrote, and plan."""
    codes: Counter[int] = Counter()
    for name, family, ways in foreign_models.pairs():
        if only not in name:
            continue
        for plan in plans:
            a, b = (
                foreign_models.train(folder / name / plan / side, family, way, 2, **PLANS[plan])
                for side, way in zip("ab", ways, strict=True)
            )
            found = judged(a, b)
            codes[found.code] += 1
            print(f"{found.code} {name} [{plan}] {dict(found.counts)}\n    {found.sentence}", flush=True)
    print(f"healthy pairs of models that nobody here wrote, by exit code: {dict(codes)}")


def planted(only: str, plans: list[str], folder: Path) -> None:
    """Print a line a planted difference and plan."""
    right: Counter[str] = Counter()
    beside: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for plant in PLANTS:
        name = f"{plant.subject}: {plant.change}"
        if only not in name:
            continue
        for plan in plans:
            a, b = (folder / f"{name} ({plan})" / side for side in "ab")
            train(a, plant.subject, plant.a, **PLANS[plan])
            train(b, plant.subject, replace(plant.a, change=plant.change, **plant.b), **PLANS[plan])
            found = judged(a, b)
            entry, step = place_of(found)
            named = found.code == 2 and plant.named(entry, step)
            pointed = found.code == 2 and not named and plant.pointed_at(found.sentence, step)
            right[plan] += named
            beside[plan] += pointed
            whole[plan] += 1
            word = "named" if named else "pointed at" if pointed else "MISSED"
            print(f"{word} {name} [{plan}] at {entry}, step {step}\n    {found.sentence}", flush=True)
    found = (f"{right[plan]} of {whole[plan]} [{plan}], pointed at in the first line {beside[plan]}" for plan in whole)
    print(f"planted differences named first: {'; '.join(found)}")


def sixteen_bits(only: str, plans: list[str], folder: Path) -> None:
    """Print a line a healthy pair and a planted fault of 16 bits, and kind of evidence."""
    accused, pairs = list[str](), set[str]()
    for name, subject, *ways in in_16_bits.healthy():
        for plan in in_16_bits.PLANS if only in name else ():
            a, b = (
                recorded(folder / name / plan / side, subject, way, **in_16_bits.PLANS[plan])
                for side, way in zip("ab", ways, strict=True)
            )
            found, said = judged_anyhow(a, b)
            pairs.add(name)
            accused += [f"{name} [{plan}]"] if found.code == 2 else []
            print(f"{found.code} {name} [{plan}] {dict(found.counts)}\n    {said}", flush=True)
    seen: dict[str, Counter[str]] = {}
    for plant, regime, behind, *ways in in_16_bits.planted():
        name = f"{plant.name} [{regime}]{', behind a first difference' if behind else ''}"
        for plan, how in in_16_bits.PLANS.items() if only in name else ():
            a = recorded(folder / f"right {plant.subject} {regime} {plan}", plant.subject, ways[0], step=[0], **how)
            b = recorded(folder / f"{name} {plan}", plant.subject, ways[1], step=[0], **how)
            found, said = judged_anyhow(a, b)
            told = b / "shows"
            seen_now = None if ways[1].kernels is None else ways[1].kernels.seen
            if seen_now is not None or plant.fault is None:
                told.write_text(str(in_16_bits.can_show(plant, plan, seen_now)))
            shows = told.read_text() == "True"
            right = found.code == 2 and re.search(plant.first, place_of(found)[0]) is not None
            counts = seen.setdefault(f"{plan}{', behind a first difference' if behind else ''}", Counter())
            counts.update(whole=1, shown=shows, seen=found.code == 2, both=found.code == 2 and shows, right=right)
            word = "named" if right else "seen" if found.code == 2 else "MISSED" if shows else "cannot be shown"
            print(f"{word} {name} [{plan}] at {place_of(found)[0]}\n    {said}", flush=True)
    print(f"healthy pairs of 16 bits: {len(pairs)}, accused: {', '.join(accused) or 'none'}")
    for plan, counts in seen.items():
        print(f"faults of 16 bits [{plan}]: {dict(counts)}")


def hostile(only: str, plans: list[str], folder: Path) -> None:
    """Print how many mutations of a dump are refused or compared, and each that should not have been called identical."""
    answers: Counter[str] = Counter()
    for plan in plans:
        dump = train(folder / f"to be changed ({plan})", "conv", Way(), step=[0], **PLANS[plan])
        for name in MUTATIONS:
            for seed in range(SEEDS if only in name else 0):
                outcome = mutate(dump, folder / "changed", name, seed)
                answers[outcome.answer if len(outcome.answer) == 1 else "refused"] += 1
                if outcome.wrong:
                    print(f"WRONG {outcome}", flush=True)
    print(f"mutations by exit code: {dict(answers)}")


def layouts(only: str, plans: list[str], folder: Path) -> None:
    """Print a line a layout of two ranks; the plan is the one that layouts need, whatever is asked for."""
    wrong: list[str] = []
    counts: Counter[bool] = Counter()
    for pair in layout_pairs.pairs(only, folder / "layouts"):
        counts[pair.healthy] += 1
        right = pair.found.code == (1 if pair.healthy else 2)
        wrong += [] if right else [pair.name]
        print(f"{pair.found.code} {pair.name} {pair.seconds:.2f} s\n    {pair.found.sentence}", flush=True)
    print(f"layouts: {counts[True]} healthy, {counts[False]} with a fault; judged wrongly: {', '.join(wrong) or 'none'}")


def large(only: str, plans: list[str], folder: Path) -> None:
    """Print what the comparison of two large dumps takes; nothing is trained for it, so that plans say nothing."""
    for line in measure_large(folder / "large", CALLS):
        print(line, flush=True)


def stored(only: str, plans: list[str], folder: Path) -> None:
    """Print what reading and measuring stored tensors takes beside `cat` of the same files."""
    for line in measure_stored(folder / "stored"):
        print(line, flush=True)


def recorded(folder: Path, subject: str, way: Way, **plan: Any) -> Path:
    """Return the folder of a dump, which is recorded unless it is there: with `--folder` it is judged again."""
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name} unfinished")
        shutil.rmtree(scratch, ignore_errors=True)
        train(scratch, subject, way, **plan).rename(folder)
    return folder


def judged(a: Path, b: Path) -> DumpsVerdict:
    """Return the verdict of two dumps."""
    pairs, missing = pair_ranks(a, b)
    return judge_runs([compare_rank(pair) for pair in pairs], missing)


def judged_anyhow(a: Path, b: Path) -> tuple[DumpsVerdict, str]:
    """Return the verdict of two dumps whose numbers of micro-batches may be two, and its first line."""
    found = compare_dumps(a, b)[1]
    return found, found.sentence


def place_of(found: DumpsVerdict) -> tuple[str, int]:
    """Return the entry that is named first, after "optimizer/" where the optimizer calls it, and the step."""
    if found.first is None:
        return "nowhere", -1
    rank, first = found.first
    parent = f"{first.call.parent}/" if isinstance(first.call.parent, str) else ""
    return parent + entry_name(first.call), rank.at.step


PARTS = {part.__name__: part for part in (healthy, foreign, planted, sixteen_bits, hostile, layouts, large, stored)}


def main() -> None:
    """Run what was asked for."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("what", nargs="?", choices=[*PARTS, "all"], default="all")
    asked.add_argument("--only", default="", help="cases whose name holds this")
    asked.add_argument("--plan", choices=[*PLANS], action="append", help="plans to record with; all of them without it")
    asked.add_argument("--folder", type=Path, help="keep the dumps here; those of 16 bits that are there are judged again")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name, which in PARTS.items():
            if options.what in (name, "all"):
                which(options.only, options.plan or [*PLANS], options.folder or Path(scratch))


main()
