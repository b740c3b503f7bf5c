"""Planted causes: does the first line of ckpt-compare name what is wrong, and does it stay quiet where nothing is?

    python -m benchmarks.ckpt_bench [--folder DIR] [--only PATTERN] [--half first|second|third]

Models of transformers, made from tiny configurations, are saved by `save_pretrained`. Each cause is planted alone in a copy of
a model, which is then written in another layout. The first line must match the cause's pattern. The same models without a
cause, in all layouts, must be identical (equal within rounding in another number format). The first half writes each layout
from the state dict; the second half has other families and lets the frameworks write: transformers (shards, number formats,
names of its modules), DeepSpeed, PEFT. The third part has quantised weights, tensors that were rearranged, vocabularies and
ranks. Prints a table and exits with 1 below the goal of 90 % named and 0 false.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.ckpt_bench.adapters import adapter_pairs
from benchmarks.ckpt_bench.causes import CAUSES, MORE_CAUSES
from benchmarks.ckpt_bench.coded import coded_pairs
from benchmarks.ckpt_bench.judged import Answer, judged
from benchmarks.ckpt_bench.layouts import LAYOUTS, write
from benchmarks.ckpt_bench.models import first_models, more_models, saved
from benchmarks.ckpt_bench.rearranged import rearranged_pairs
from benchmarks.ckpt_bench.trained import trained_pairs
from benchmarks.ckpt_bench.writers import LOW, WRITERS, lose_shard, rewrite

GOAL = 0.9


def first_pairs(folder: Path, only: str) -> Iterator[Answer]:
    """Yield the answers of the first half."""
    for name, make in first_models().items():
        if not fnmatch.fnmatch(name, only):
            continue
        source = saved(name, make, folder)
        held = load_file(source / "model.safetensors")
        for number, layout in enumerate(LAYOUTS):
            path = folder / f"{name}-{layout}"
            if write(layout, held, source, path):
                found = judged(source, path)
                yield Answer(name, layout, "", found.code == 0, found.sentence)
            for place, (cause, (plant, pattern)) in enumerate(CAUSES.items()):
                if place % 3 != number % 3:
                    continue  # each cause in a third of the layouts
                state = dict(held)
                path = folder / f"{name}-{layout}-{place}"
                if plant(state) and write(layout, state, source, path):
                    found = judged(source, path)
                    good = found.code > 1 and bool(re.search(pattern, found.sentence))
                    yield Answer(name, layout, cause, good, found.sentence)


def second_pairs(folder: Path, only: str) -> Iterator[Answer]:
    """Yield the answers of the second half: other families, written by the frameworks themselves."""
    causes = {**CAUSES, **MORE_CAUSES}
    for number, (name, make) in enumerate(more_models().items()):
        if not fnmatch.fnmatch(name, only):
            continue
        source = saved(name, make, folder)
        held = load_file(source / "model.safetensors")
        for layout in WRITERS:
            path = folder / f"{name}-{layout}"
            if rewrite(layout, held, source, path):
                found = judged(source, path)
                yield Answer(name, layout, "", found.code <= int(layout in LOW), found.sentence)
        for place, (cause, (plant, pattern)) in enumerate(causes.items()):
            layout, path = WRITERS[(place + number) % len(WRITERS)], folder / f"{name}-{place}"
            state = dict(held)
            if cause == layout:
                continue  # what the layout itself does is no cause
            if plant(state) and rewrite(layout, state, source, path):
                found = judged(source, path)
                good = found.code > 1 and bool(re.search(pattern, found.sentence))
                yield Answer(name, layout, cause, good, found.sentence)
        path = folder / f"{name}-shard"
        if rewrite("shards", held, source, path):
            lost = lose_shard(path)
            found = judged(source, path)
            yield Answer(name, "shards", "a shard lost", found.code == 3 and lost in found.sentence, found.sentence)
    for pairs, name in ((adapter_pairs, "adapters"), (trained_pairs, "trained")):
        if fnmatch.fnmatch(name, only):
            yield from pairs(folder / name)


def third_pairs(folder: Path, only: str) -> Iterator[Answer]:
    """Yield the answers of the third part."""
    for pairs, name in ((coded_pairs, "coded"), (rearranged_pairs, "rearranged")):
        if fnmatch.fnmatch(name, only):
            yield from pairs(folder / name)


def main() -> int:
    """Run all pairs, print what was missed and a table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="*", help="models whose name matches this pattern")
    parser.add_argument("--half", choices=("first", "second", "third"), help="one part of the bench")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    halves = {"first": first_pairs, "second": second_pairs, "third": third_pairs}
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for half in [given.half] if given.half else list(halves):
        with tempfile.TemporaryDirectory(dir=given.folder) as made:
            for answer in halves[half](Path(made), given.only):
                total[answer.cause] += 1
                right[answer.cause] += answer.good
                if not answer.good:
                    print(f"{answer.model}, {answer.layout}, {answer.cause or 'healthy'}: {answer.sentence}", flush=True)
    for cause in total:
        print(f"| {cause or 'nothing planted'} | {right[cause]} of {total[cause]} |")
    planted = sum(total.values()) - total[""]
    named = sum(right.values()) - right[""]
    print(f"{named} of {planted} causes named in the first line, {total[''] - right['']} of {total['']} healthy pairs accused")
    return int(named < GOAL * planted or right[""] < total[""])


if __name__ == "__main__":
    sys.exit(main())
