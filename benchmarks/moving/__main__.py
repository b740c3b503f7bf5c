"""Plants one difference at a time between twin GPTs of PyTorch and MindSpore, and holds the runs against each other.

    python -m benchmarks.moving [--seed N] [--only NAME] [--swap] [--keep DIR]

TRAINPROBE_TORCH_PYTHON and TRAINPROBE_MINDSPORE_PYTHON name the two Pythons. A difference is named where the first line of
`config-check compare` or of `dump-compare` matches the pattern that stands beside it, which was written before the comparison
was looked at. A healthy pair is quiet where config-check says "no difference found" and dump-compare "agrees within rounding".
Seed 0 is fixed; others draw sizes, layers, optimizer, mask, micro-steps, and the side and parameter of the fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.moving.twins import Twin

ROOT = Path(__file__).parents[2]
QUIET = re.compile(r"no difference found|agrees within rounding")


@dataclass(frozen=True)
class Case:
    """Twins of PyTorch and MindSpore, and what a first line has to match; "" where nothing differs."""

    torch: Twin
    mindspore: Twin
    pattern: str = ""


def healthy(seed: int) -> Twin:
    """Return the twin of a seed."""
    if not seed:
        return Twin()
    draw = random.Random(seed)
    heads = draw.choice((2, 3, 4))
    drawn = Twin(
        seed=seed + 1,
        layers=draw.choice((1, 2, 3)),
        width=heads * draw.choice((6, 8, 16)),
        heads=heads,
        words=draw.choice((37, 61, 101)),
        length=draw.choice((5, 9, 16)),
        batch=draw.choice((2, 3, 5)),
        micro=draw.choice((1, 2, 4)),
        norm=draw.choice(("layer", "rms")),
        activation=draw.choice(("gelu", "silu")),
        mask=draw.choice((-1e4, -1e9, float("-inf"))),
        bias=draw.choice((True, False)),
        optimizer=draw.choice(("AdamW", "Adam", "SGD")),
        rate=draw.choice((1e-3, 1e-2)),
        clip=draw.choice((0.0, 0.5)),
    )
    return replace(drawn, decay=0.0) if drawn.optimizer == "SGD" else drawn


def cases(seed: int) -> dict[str, Case]:
    """Return case → twins, of one seed."""
    base, draw = healthy(seed), random.Random(-seed)
    block = draw.randrange(base.layers)
    norm = "LayerNorm" if base.norm == "layer" else "RMSNorm"
    square, weight = f"blocks.{block}.attention.proj.weight", f"blocks.{block}.mlp.{draw.choice(('up', 'down'))}.weight"
    adam = replace(base, optimizer="AdamW")
    decays = tuple(1 / (1 + 0.5 * step) for step in range(base.steps))
    planted = {
        "learning rate": (replace(base, schedule=decays), r"learning rate"),
        "dropout": (replace(base, dropout=0.1), r"dropout p"),
        "epsilon of a norm": (replace(base, epsilon=1e-7), rf"eps of {norm}"),
        "initial weight": (replace(base, initial=weight), re.escape(weight)),
        "order of the data": (replace(base, order="batches"), r"order"),
        "clipping": (replace(base, clip=0.0 if base.clip else 0.1), r"clip"),
        "loss scale": (replace(base, scale=1024.0, left_scaled=True), r"loss.?scale|1024 times|1/1024"),
        "transposed weight": (replace(base, transposed=square), rf"{re.escape(square)}.*(order|transpos)"),
        "gradient × 1.03": (replace(base, grow=1.03), r"^(?!.*backward\.\d).*grad.*(1\.03|0\.971?) times"),
    }
    found = {"healthy": Case(base, base)}
    for name, (twin, pattern) in planted.items():
        of_torch = bool(seed) and draw.random() < 0.5
        found[name] = Case(twin, base, pattern) if of_torch else Case(base, twin, pattern)
    found["healthy AdamW"] = Case(adam, adam)
    found["optimizer"] = Case(adam, replace(adam, optimizer="AdamWeightDecay"), r"AdamWeightDecay")
    sgd = replace(base, optimizer="SGD", decay=0.1)
    if base.norm == "layer":
        found["decay of norms"] = Case(sgd, sgd, r"weight decay of \S*norm")  # MindSpore's optimizers spare gamma and beta
    found["number format"] = Case(base, replace(base, half=f"blocks.{block}.mlp"), r"float16")
    if not seed:
        found["healthy, four micro-steps"] = Case(replace(base, micro=4), replace(base, micro=4))
        found["healthy, mask of -inf"] = Case(replace(base, mask=float("-inf")), replace(base, mask=float("-inf")))
        found["healthy, loss scaled"] = Case(replace(base, scale=256.0), replace(base, scale=256.0))
    return found


def _pythons() -> dict[str, str]:
    return {
        "torch": os.environ.get("TRAINPROBE_TORCH_PYTHON", sys.executable),
        "mindspore": os.environ.get("TRAINPROBE_MINDSPORE_PYTHON", str(ROOT / ".venvs/mindspore/bin/python")),
    }


def _train(chosen: Mapping[str, Case], folder: Path) -> dict[str, dict[str, Path]]:
    """Train the twins of all cases, each distinct one once; return case → framework → its folder."""
    found: dict[str, dict[str, Path]] = {name: {} for name in chosen}
    for framework, python in _pythons().items():
        distinct: dict[Twin, Path] = {}
        for name, case in chosen.items():
            twin: Twin = getattr(case, framework)
            found[name][framework] = distinct.setdefault(twin, folder / f"{framework}{len(distinct)}")
        wanted = {str(at): twin.given() for twin, at in distinct.items() if not at.exists()}
        given = folder / f"{framework}.json"
        given.write_text(json.dumps(wanted), encoding="utf-8")
        _run([python, "-m", f"benchmarks.moving.gpt_{framework}", str(given)])
    return found


def _run(command: list[str]) -> str:
    about = {"PYTHONPATH": str(ROOT), "GLOG_v": "3", "TRAINPROBE_ON_ERROR": "raise"}
    done = subprocess.run(command, env={**os.environ, **about}, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode > 3 or not (done.stdout or "-m trainprobe" not in " ".join(command)):
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return next(iter(done.stdout.splitlines()), "")


def main() -> None:
    """Print one JSON line a case, and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--swap", action="store_true", help="MindSpore is A")
    parser.add_argument("--keep", type=Path, help="where the runs are kept, and taken from if they are there")
    asked = parser.parse_args()
    chosen = {name: case for name, case in cases(asked.seed).items() if asked.only in name}
    with tempfile.TemporaryDirectory() as made:
        folder = asked.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        runs = _train(chosen, folder)
        named, quiet = 0, 0
        for name, case in chosen.items():
            sides = [runs[name][framework] for framework in ("torch", "mindspore")][:: -1 if asked.swap else 1]
            packs = [str(side / "config_check_pack.zip") for side in sides]
            program = [sys.executable, "-m", "trainprobe"]
            lines = [
                _run([*program, *words]) for words in (["config-check", "compare", *packs], ["dump-compare", *map(str, sides)])
            ]
            right = [bool(re.search(case.pattern, line)) if case.pattern else bool(QUIET.search(line)) for line in lines]
            good = any(right) if case.pattern else all(right)
            named, quiet = named + (good and bool(case.pattern)), quiet + (good and not case.pattern)
            print(json.dumps({"case": name, "good": good, "config-check": lines[0], "dump-compare": lines[1]}), flush=True)
    planted = sum(bool(case.pattern) for case in chosen.values())
    print(json.dumps({"seed": asked.seed, "named": f"{named} of {planted}", "quiet": f"{quiet} of {len(chosen) - planted}"}))


if __name__ == "__main__":
    main()
