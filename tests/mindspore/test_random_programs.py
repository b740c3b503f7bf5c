"""No probe changes a bit of a training, whatever its cells share: programs that are written at random, in each mode."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.mindspore.launch import run
from tests.mindspore.random_programs import WIDTH, net
from trainprobe.engine.capture.mindspore.graph_callback import GraphCallbacks
from trainprobe.watching import watch

WHOLE = {"level": "L0", "monitor": True, "audit": {"every": 1}, "on_error": "raise", "console": False}
STEPS = 2
ASYNCHRONOUS = "all"
MODES = {"PyNative": (ms.PYNATIVE_MODE, None), "O0": (ms.GRAPH_MODE, "O0"), "O1": (ms.GRAPH_MODE, "O1")}


def trained(seed: int, folder: Path, mode: str, output: Path | None, callbacks: Any = True, odd: bool = False) -> list[bytes]:
    """Train a program, with a probe where there is an output; return what it leaves."""
    number, level = MODES[mode]
    ms.set_context(mode=number)
    ms.set_seed(seed)
    np.random.seed(seed)
    model = net(seed, folder, odd)
    optimizer = nn.Momentum(model.trainable_params(), 0.05, 0.9)
    step = nn.TrainOneStepCell(model, optimizer)
    if level is not None:
        step.set_jit_config(ms.JitConfig(jit_level=level))
    step.set_train()
    on = {"graph_callbacks": callbacks} if level is not None else {}
    left = []
    with watch(model, optimizer, output=str(output), **WHOLE, **on) if output is not None else nullcontext() as probe:
        for data in np.random.default_rng(seed).standard_normal((STEPS, 8, WIDTH)).astype(np.float32):
            with probe.step() if probe is not None else nullcontext():
                left.append(step(ms.Tensor(data)).asnumpy().tobytes())
    return [*left, *(p.asnumpy().tobytes() for p in (*model.get_parameters(), *optimizer.moments))]


@pytest.mark.parametrize("mode", MODES)
def test_no_bit_of_thirty_random_programs_changes(mode: str, tmp_path: Path) -> None:
    first = 10 * [*MODES].index(mode)
    changed = [
        seed
        for seed in range(first, first + 10)
        if trained(seed, tmp_path, mode, tmp_path / str(seed)) != trained(seed, tmp_path, mode, None)
    ]
    assert changed == []


def test_no_bit_changes_of_programs_whose_source_is_hard_to_read(tmp_path: Path) -> None:
    """Early returns, branches on values, loops, containers, inner functions, writes, members with names of methods."""
    changed = [
        seed
        for seed in range(4)
        if trained(seed, tmp_path, "O0", tmp_path / str(seed), odd=True) != trained(seed, tmp_path, "O0", None, odd=True)
    ]
    assert changed == []


def test_the_programs_are_such_that_looking_everywhere_changes_bits(tmp_path: Path) -> None:
    """An oracle of the test above: `all` looks at the same programs at inputs and at values that are used elsewhere too."""
    program = 0
    assert trained(program, tmp_path, "O0", tmp_path / "all", "all") != trained(program, tmp_path, "O0", None)


def test_most_cells_of_the_programs_are_recorded(tmp_path: Path) -> None:
    parts = [GraphCallbacks().parts(cell) for seed in range(30) for _, cell in net(seed, tmp_path).cells_and_names()]
    assert sum(one.result for one in parts) > 0.7 * len(parts)
    assert sum(len(one.inputs) == one.arguments for one in parts) > 0.6 * len(parts)


def test_where_a_cell_assigns_to_a_parameter_nothing_is_recorded_in_a_graph_and_a_note_says_so(tmp_path: Path) -> None:
    """In a process of its own: MindSpore compiles otherwise from then on, and the class stays in the process."""
    clean = run("run_counting", str(tmp_path / "clean"), cwd=tmp_path)["true"]
    assert clean["same"] and clean["entries"] > 4 and not any("Counting" in note for note in clean["notes"])
    for how, cell in (("counting", "Counting"), ("by a method", "CountingByMethod")):
        told = run("run_counting", str(tmp_path / how), how, cwd=tmp_path)
        assert told["true"]["same"] and told["true"]["entries"] == 0
        assert any(f"{cell}.construct assigns to a parameter" in note for note in told["true"]["notes"])
        assert told["all"]["entries"] > 4
