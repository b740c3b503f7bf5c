"""What the first line says of planted causes in reinforcement learning, and of healthy pairs.

    python -m benchmarks.rollout [--part logprobs|weights|health|layers] [--details] [--seed 0]

Log-probabilities: tiny random models of transformers score the same tokens in two ways. Eleven causes with two seeds each must
be named first; ten healthy pairs must be called identical or rounding. Weights: twelve faults in two layouts must be named with
the tensor; twenty healthy pushes must arrive. Health: seventeen faults of GRPO loops must be named first, and twenty healthy
loops have no finding. Layers: the first module of 15 faults of an engine must be named, and ten healthy pairs must agree
within rounding. Exits with 1 below 20 of 22, 22 of 24, 16 of 17 or 14 of 15, or with a false answer.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.rollout import layers as modules
from benchmarks.rollout import weights as pushes
from benchmarks.rollout.health import results
from benchmarks.rollout.logprobs import healthy, planted
from benchmarks.rollout.models import LAYERS
from trainprobe.rollout.logprobs.judge import judge
from trainprobe.rollout.logprobs.read import read_file

GOAL, GOAL_OF_WEIGHTS, GOAL_OF_HEALTH, GOAL_OF_LAYERS = 20, 22, 16, 14


def logprobs(details: bool, seed: int) -> bool:
    """Print the answers; return whether the goal is met."""
    named = found = false = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in [*planted(seed), *healthy(seed + 2)]:
            path = Path(folder) / "case.safetensors"
            save_file({name: np.ascontiguousarray(array) for name, array in case.table.items()}, path)
            answer = judge(read_file(path), case.dtype, LAYERS)
            first = answer.causes[0].name if answer.causes else ""
            good = first == case.name and (answer.verdict.code == 2) == bool(case.name)
            named += bool(case.name) and good
            found += bool(case.name) and answer.verdict.code == 2
            false += not case.name and not good
            print(
                f"{'ok  ' if good else 'MISS'} {case.name or 'healthy':13} {case.variant:30} {answer.verdict.sentence}",
                flush=True,
            )
            if details:
                print(*(f"       {line}" for line in answer.verdict.details), sep="\n")
    print(f"log-probabilities: {found} of 22 found, {named} named first, {false} false of 10 healthy pairs")
    return named >= GOAL and not false


def weights() -> bool:
    """Print the answers; return whether the goal is met."""
    named = found = false = 0
    for fault, layout, pattern, answer in pushes.planted():
        good = bool(re.search(pattern, answer.verdict.sentence))
        named, found = named + good, found + (answer.verdict.code > 1)
        print(f"{'ok  ' if good else 'MISS'} {fault:22} {layout:12} {answer.verdict.sentence}", flush=True)
    for which, answer in pushes.healthy():
        false += answer.verdict.code != 0
        if answer.verdict.code:
            print(f"FALSE {which} {answer.verdict.sentence}")
    print(f"weights: {found} of 24 found, {named} named with the tensor, {false} alarms in 20 healthy pushes")
    return named >= GOAL_OF_WEIGHTS and not false


def health(seed: int) -> bool:
    """Print the answers; return whether the goal is met."""
    named = found = false = 0
    for case, messages in results(seed):
        good = bool(re.search(case.fault, messages[0])) if case.fault and messages else not case.fault and not messages
        named += bool(case.fault) and good
        found += bool(case.fault and messages)
        false += not case.fault and not good
        print(f"{'ok  ' if good else 'MISS'} {case.name:20} {messages[0] if messages else 'no finding'}", flush=True)
    print(f"health: {found} of 17 found, {named} named first, {false} alarms in 20 healthy loops")
    return named >= GOAL_OF_HEALTH and not false


def layers(details: bool) -> bool:
    """Print the answers; return whether the goal is met."""
    named = found = false = planted = 0
    for case, verdict in modules.results():
        good = modules.named(case, verdict.sentence) if case.pattern else verdict.code < 2
        planted += bool(case.pattern)
        named += bool(case.pattern) and good
        found += bool(case.pattern) and verdict.code == 2
        false += not case.pattern and not good
        print(f"{'ok  ' if good else 'MISS'} {case.name:45} {verdict.sentence}", flush=True)
        if details:
            print(*(f"       {line}" for line in verdict.details), sep="\n")
    print(f"layers: {found} of {planted} found, {named} named first, {false} false of 10 healthy pairs")
    return named >= GOAL_OF_LAYERS and not false


def main() -> None:
    """Run the benches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["logprobs", "weights", "health", "layers"])
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="the first, an even number")
    given = parser.parse_args()
    parts = {
        "logprobs": lambda: logprobs(given.details, given.seed),
        "weights": weights,
        "health": lambda: health(given.seed),
        "layers": lambda: layers(given.details),
    }
    met = [part() for name, part in parts.items() if given.part in (None, name)]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
