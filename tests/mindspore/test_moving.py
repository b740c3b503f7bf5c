"""Twin GPTs in both frameworks with one planted difference: a first line names it, and the healthy pair is quiet.

The same twins as in `python -m benchmarks.moving`, in a smaller size and with two micro-steps.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest

from benchmarks.moving import gpt_mindspore
from benchmarks.moving.twins import Twin
from tests.mindspore.launch import ENVIRONMENT
from tests.mindspore.test_across_frameworks import ROOT, TORCH
from trainprobe.cli import main
from trainprobe.config_check.pack_reader import read_pack

BASE = Twin(layers=1, width=12, heads=2, words=17, length=5, batch=2, micro=2, steps=2, clip=0.5)
ONE = replace(BASE, micro=1, clip=0.0)
SGD = replace(BASE, optimizer="SGD", mask=-1e9, decay=0.0)
MATRIX = "blocks.0.attention.proj.weight"
# what differs in MindSpore → (twin of PyTorch, twin of MindSpore, what config-check says first, what dump-compare says first)
QUIET = r"^no difference found", r"^what both dumps hold agrees within rounding"
PLANTED: dict[str, tuple[Twin, Twin, str, str]] = {
    "nothing": (BASE, BASE, *QUIET),
    "Adam": (replace(BASE, optimizer="Adam"), replace(BASE, optimizer="Adam"), *QUIET),
    "SGD": (SGD, SGD, *QUIET),
    "decay of norms": (  # MindSpore's optimizers spare gamma and beta where nobody says otherwise
        replace(SGD, decay=0.1),
        replace(SGD, decay=0.1),
        r"^optimizer weight decay of blocks\.0\.norm1\.weight and 5 more differs: applied and not applied",
        r"^the first difference is in the optimizer's step \(step 0, rank 0\): .* 6 of 17 weights move otherwise",
    ),
    "schedule": (
        ONE,
        replace(ONE, schedule=(1.0, 0.5)),
        r"^learning rate differs from optimizer step 1 on: 0\.01 and 0\.005",
        r"^the first difference is in the optimizer's step \(step 1, rank 0\)",
    ),
    "optimizer": (
        ONE,
        replace(ONE, optimizer="AdamWeightDecay"),
        r"^optimizer class differs: AdamW and AdamWeightDecay \(without bias correction\)",
        r"^the first difference is in the optimizer's step \(step 0, rank 0\)",
    ),
    "dropout": (ONE, replace(ONE, dropout=0.2), r"^dropout p in module blocks\.0\.dropout differs: 0\.0 and 0\.2", "dropout"),
    "epsilon": (
        ONE,
        replace(ONE, epsilon=1e-7),
        r"^eps of LayerNorm in 3 modules, blocks\.0\.norm1 the first, differs: 1e-05 and 1e-07",
        "",
    ),
    "format": (ONE, replace(ONE, half="blocks.0.mlp"), r"^to_float in 4 modules, .* differs: \(none\) and float16", ""),
    "clipping": (
        BASE,
        replace(BASE, clip=0.0),
        r"^gradient clipping is only in bench: function clip_grad_norm_, max_norm 0\.5",
        r"words\.weight\.grad,.* times as large in B .*clipped or scaled in between",
    ),
    "gradients": (ONE, replace(ONE, grow=1.03), QUIET[0], r"words\.weight\.grad,.* grad is 1\.03 times as large in B"),
    "loss scale": (ONE, replace(ONE, scale=1024.0, left_scaled=True), "", r"1024 times as large in B"),
    "transposed": (
        ONE,
        replace(ONE, transposed=MATRIX),
        rf"^weight {MATRIX} differs from the start: .* the same numbers in another order have",
        r"^the first difference is at Module\.blocks\.0\.attention\.proj\..* the same numbers in another order",
    ),
}
WEIGHTS = {"summary": "both"}  # fingerprints tell another order


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[Twin, Path]:
    """Runs of the twins in PyTorch, made in an environment that holds it."""
    if not TORCH.exists():
        pytest.skip(f"no Python with PyTorch at {TORCH}: name one in TRAINPROBE_TORCH_PYTHON")
    folder = tmp_path_factory.mktemp("torch")
    runs = {twin: folder / str(i) for i, twin in enumerate(dict.fromkeys(twins[0] for twins in PLANTED.values()))}
    given = folder / "twins.json"
    given.write_text(json.dumps({str(path): twin.given() | {"plan": WEIGHTS} for twin, path in runs.items()}))
    command = [str(TORCH), "-m", "benchmarks.moving.gpt_torch", str(given)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return runs


def first_lines(capsys: pytest.CaptureFixture[str], *sides: Path) -> list[str]:
    lines: list[str] = []
    for words in (
        ["config-check", "compare", *(str(side / "config_check_pack.zip") for side in sides)],
        ["dump-compare", *map(str, sides)],
    ):
        capsys.readouterr()
        main(words)
        lines.append(capsys.readouterr().out.splitlines()[0])
    return lines


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_named(
    planted: str, of_torch: dict[Twin, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    torch, mindspore, *says = PLANTED[planted]
    gpt_mindspore.train(mindspore, tmp_path / "run", WEIGHTS)
    lines = first_lines(capsys, of_torch[torch], tmp_path / "run")
    for line, pattern in zip(lines, says, strict=True):
        assert re.search(pattern, line), lines
    if planted == "nothing":
        assert first_lines(capsys, tmp_path / "run", of_torch[torch])[1] == lines[1]


def test_a_pack_of_mindspore_holds_settings_of_cells_rates_and_the_formula(tmp_path: Path) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    gpt_mindspore.train(replace(ONE, optimizer="Adam", steps=3, schedule=(1.0, 0.5, 0.25)), tmp_path / "run")
    sources: list[dict[str, Any]] = (
        read_pack(tmp_path / "run/config_check_pack.zip").ranks[0].single["hyperparameters"]["sources"]
    )
    held = {one["kind"]: one["values"] for one in sources}
    assert held["model"]["blocks.0.dropout"] == "Dropout(p=0.0)"
    assert "epsilon=1e-05" in held["model"]["norm"]
    assert held["optimizer"]["lr_by_step"] == [[0.01], [0.005], [0.0025]]
    assert held["optimizer"]["group0.lr"] == 0.01
    assert held["optimizer"]["formula.eps"] == "before the bias correction"
