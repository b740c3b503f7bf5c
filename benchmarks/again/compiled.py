"""`trainprobe.compile_check` of programs whose compilation is spoilt, and of healthy ones.

python -m benchmarks.again.compiled [--only WORDS]
"""

from __future__ import annotations

import argparse
import importlib.util
import time

import torch

from benchmarks.again.compiled_cases import HEALTHY, PLANTED
from trainprobe.again.conditions.compiled import compile_check


def main() -> None:
    """Print a line a program, and the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    only, figures = parser.parse_args().only, {"named": [0, 0], "alarms": [0, 0], "no answer of healthy ones": [0, 0]}
    for name, case in (PLANTED | HEALTHY).items():
        if only not in name or importlib.util.find_spec(case.needs) is None:
            continue
        begin = time.monotonic()
        torch._dynamo.reset()
        loss, model, batch = case.step()
        with case.spoilt():
            verdict = compile_check(loss, model, batch)
        planted = name in PLANTED
        right = verdict.code == 2 and (verdict.module, verdict.tensor) == (case.module, case.tensor)
        healthy = {"alarms": verdict.code == 2, "no answer of healthy ones": verdict.code == 3}
        for figure, hit in ({"named": right} if planted else healthy).items():
            figures[figure][0] += hit
            figures[figure][1] += 1
        word = ("named" if right else "MISSED") if planted else ("quiet", "quiet", "ALARM", "NONE")[verdict.code]
        print(f"{word:7} {name:46} {time.monotonic() - begin:5.0f} s  {verdict.code} {verdict.sentence}", flush=True)
    for word, (hits, of) in figures.items():
        print(f"{word}: {hits} of {of}")


if __name__ == "__main__":
    main()
